//! `kubectl mirror on` and `off`: create, change and delete Mirrors of workloads.
//!
//! The name of the Mirror is derived from the workload, so that the second call finds the Mirror of the first one.

use anyhow::bail;
use kube::{
    ResourceExt as _,
    api::{DeleteParams, Patch, PatchParams, Preconditions},
    core::Status,
};
use mirror_api::{MAX_NAME, Mirror, MirrorSpec, TargetRef};
use sha2::{Digest as _, Sha256};

use crate::{
    cli::{Change, DryRun, OffArgs, OnArgs, SettingArgs},
    cluster::Cluster,
    print,
    resource::Resource,
    screen::{Output, object},
    workload::Workload,
};

/// The field manager of server-side apply, and the value of [`LABEL`].
const MANAGER: &str = "kubectl-mirror";
/// The label of Mirrors that `on` creates. `off` deletes no others.
const LABEL: &str = "app.kubernetes.io/managed-by";

/// Creates or changes the Mirror.
pub(crate) async fn on(args: OnArgs, cluster: &Cluster) -> anyhow::Result<()> {
    let (name, workload) = args.named()?;
    let OnArgs { which, target, direction, settings: SettingArgs(settings), change, .. } = args;
    let labels = match workload {
        Some(workload) => workload.resolve(cluster).await?,
        None => which.selector.unwrap_or_default(),
    };
    let spec = MirrorSpec {
        pod_selector: labels,
        direction,
        settings,
        target_ref: target.map(|name| TargetRef { name }),
        ..MirrorSpec::default()
    };
    let mut mirror = Mirror::new(&name, spec);
    mirror.metadata.namespace = Some(cluster.namespace.clone());
    mirror.metadata.labels = Some([(LABEL.to_owned(), MANAGER.to_owned())].into());
    let api = cluster.own::<Mirror>();
    let is_only_printed = change.dry_run == DryRun::Client;
    let before = if is_only_printed { None } else { api.get_opt(&name).await? };
    if let Some(before) = &before {
        refuse_others(before)?;
    }
    if !is_only_printed {
        let params = PatchParams { dry_run: change.dry_run == DryRun::Server, ..PatchParams::apply(MANAGER) };
        mirror = api.patch(&name, &params, &Patch::Apply(&mirror)).await?;
    }
    let done = match before {
        None => "created",
        Some(before) if before.spec == mirror.spec => "unchanged",
        Some(_) => "configured",
    };
    let line = format!("{} {done}", Resource::from(&mirror).resource());
    say(mirror, &line, &change)
}

/// Deletes the Mirror.
pub(crate) async fn off(args: OffArgs, cluster: &Cluster) -> anyhow::Result<()> {
    let (api, name) = (cluster.own::<Mirror>(), args.named()?);
    let mirror = match api.get(&name).await {
        Err(kube::Error::Api(status)) if args.ignore_not_found && is_missing(&status, &name) => return Ok(()),
        mirror => mirror?,
    };
    refuse_others(&mirror)?;
    if args.change.dry_run != DryRun::Client {
        let preconditions = Some(Preconditions { uid: mirror.uid(), resource_version: None });
        let dry_run = args.change.dry_run == DryRun::Server;
        api.delete(&name, &DeleteParams { dry_run, preconditions, ..DeleteParams::default() }).await?;
    }
    let resource = Resource::from(&mirror);
    let line = format!("{} \"{name}\" deleted from {} namespace", resource.type_(), cluster.namespace);
    say(mirror, &line, &args.change)
}

/// Whether this object does not exist. Without the CRD, the API server answers with 404 too, and names no object.
fn is_missing(status: &Status, name: &str) -> bool {
    status.code == 404 && status.details.as_ref().is_some_and(|details| details.name == name)
}

/// Prints what was done, as kubectl does.
fn say(mut mirror: Mirror, line: &str, Change { dry_run, output }: &Change) -> anyhow::Result<()> {
    mirror.metadata.managed_fields = None;
    let dry_run = match dry_run {
        DryRun::None => "",
        DryRun::Client => " (dry run)",
        DryRun::Server => " (server dry run)",
    };
    print(&match output {
        None => format!("{line}{dry_run}\n"),
        Some(Output::Name) => format!("{}\n", Resource::from(&mirror).resource()),
        Some(output) => object(&mirror, output)?,
    })
}

/// Refuses a Mirror that was not created by `on`.
fn refuse_others(mirror: &Mirror) -> anyhow::Result<()> {
    if mirror.labels().get(LABEL).is_some_and(|manager| manager == MANAGER) {
        return Ok(());
    }
    let (namespace, name) = (mirror.namespace().unwrap_or_default(), mirror.name_any());
    bail!(
        "the Mirror {namespace}/{name} was not created by `kubectl mirror on`, so it is left alone; delete it with \
         `kubectl -n {namespace} delete mirror {name}`, or choose another name with --name"
    )
}

/// The name of the Mirror of a workload. A name that is too long or contains a dot gets a hash as its suffix.
pub(crate) fn name_of(workload: &Workload) -> String {
    let name = workload.to_string().replace('/', "-");
    if name.len() <= MAX_NAME && !name.contains('.') {
        return name;
    }
    let hash: String = Sha256::digest(&name).iter().take(4).map(|byte| format!("{byte:02x}")).collect();
    let name = name.replace('.', "-");
    let most = MAX_NAME - hash.len() - 1;
    format!("{}-{hash}", name.get(..most).unwrap_or(&name).trim_end_matches('-'))
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

    use mirror_core::model::Name;
    use proptest::prelude::*;

    use crate::workload::parse;

    fn name_of(text: &str) -> String {
        super::name_of(&parse(&[text.to_owned()]).unwrap()[0])
    }

    #[test]
    fn the_name_of_a_mirror_tells_its_workload() {
        assert_eq!(name_of("deployment/checkout"), "deploy-checkout");
        let [dot, dash] = ["svc/a.b", "svc/a-b"].map(name_of);
        assert!(dot.starts_with("svc-a-b-") && dash == "svc-a-b", "{dot} {dash}");
    }

    proptest! {
        #[test]
        fn every_workload_has_a_name_that_a_mirror_can_have(
            kind in "(deploy|sts|ds|svc)",
            name in "[a-z0-9]([-a-z0-9.]{0,100}[a-z0-9])?",
            other in "[a-z0-9]([-a-z0-9.]{0,100}[a-z0-9])?",
        ) {
            let [one, two] = [&name, &other].map(|name| name_of(&format!("{kind}/{name}")));
            prop_assert!(one.parse::<Name>().is_ok(), "{one}");
            prop_assert_eq!(one == two, name == other);
        }
    }
}
