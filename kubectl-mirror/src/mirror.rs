//! `kubectl mirror on` and `off`: create, change and delete Mirrors of workloads.
//!
//! The name of the Mirror is derived from the workload, so that the second call finds the Mirror of the first one.

use anyhow::{Context as _, bail};
use kube::{
    Api, ResourceExt as _,
    api::{DeleteParams, Patch, PatchParams},
};
use mirror_api::{Direction, MAX_NAME, Mirror, MirrorSpec, SettingsSpec, TargetRef};
use sha2::{Digest as _, Sha256};

use crate::{
    cli::{self, OffArgs, OnArgs},
    cluster::Cluster,
    tell,
    workload::{Kind, Workload},
};

/// The field manager of server-side apply, and the value of [`LABEL`].
const MANAGER: &str = "kubectl-mirror";
/// The label of Mirrors that `on` creates. `off` deletes no others.
const LABEL: &str = "app.kubernetes.io/managed-by";

/// Creates or changes the Mirror.
pub(crate) async fn on(args: OnArgs, cluster: &Cluster) -> anyhow::Result<()> {
    let name = match (&args.name, &args.which.workload) {
        (Some(name), _) => name.clone(),
        (None, Some(workload)) => name_of(workload),
        (None, None) => bail!("--name is required with labels (-l)"),
    };
    if let Some(Workload { kind: Kind::Pod, name: pod }) = &args.which.workload {
        bail!(
            "a Mirror selects pods by labels, not by name: use `kubectl annotate pod {pod} \
             podmirror.io/mirror=true`, or -l with labels of that pod, and --name"
        );
    }
    let settings = SettingsSpec::of(&args.settings()?).map_err(anyhow::Error::msg)?;
    let selection = args.which.resolve(cluster).await?;
    let spec = MirrorSpec {
        pod_selector: selection.labels,
        direction: args.direction.map(|direction| match direction {
            cli::Direction::Both => Direction::Both,
            cli::Direction::Ingress => Direction::Ingress,
            cli::Direction::Egress => Direction::Egress,
        }),
        settings,
        target_ref: args.target.map(|name| TargetRef { name }),
        ..MirrorSpec::default()
    };
    let mut mirror = Mirror::new(&name, spec);
    mirror.metadata.labels = Some([(LABEL.to_owned(), MANAGER.to_owned())].into());
    let api = mirrors(cluster);
    let namespace = &cluster.namespace;
    if let Some(there) = api.get_opt(&name).await.context("cannot read the Mirrors")? {
        refuse_others(&there, namespace)?;
    }
    let params = PatchParams::apply(MANAGER);
    let applied = api.patch(&name, &params, &Patch::Apply(&mirror)).await;
    applied.with_context(|| format!("cannot create or update the Mirror {name} in namespace {namespace}"))?;
    tell(&format!(
        "the Mirror {namespace}/{name} is created or updated; `kubectl mirror status` shows its status"
    ));
    Ok(())
}

/// Deletes the Mirror.
pub(crate) async fn off(args: OffArgs, cluster: &Cluster) -> anyhow::Result<()> {
    let name = match (args.name, &args.workload) {
        (Some(name), _) => name,
        (None, Some(workload)) => name_of(workload),
        (None, None) => bail!("name a workload, or a Mirror with --name"),
    };
    let (api, namespace) = (mirrors(cluster), &cluster.namespace);
    let there = api.get_opt(&name).await.context("cannot read the Mirrors")?;
    let there = there.with_context(|| format!("Mirror {name} not found in namespace {namespace}"))?;
    refuse_others(&there, namespace)?;
    let deleted = api.delete(&name, &DeleteParams::default()).await;
    deleted.with_context(|| format!("cannot delete the Mirror {name} in namespace {namespace}"))?;
    tell(&format!("the Mirror {namespace}/{name} is deleted"));
    Ok(())
}

fn mirrors(cluster: &Cluster) -> Api<Mirror> {
    Api::namespaced(cluster.client.clone(), &cluster.namespace)
}

/// Refuses a Mirror that was not created by `on`.
fn refuse_others(mirror: &Mirror, namespace: &str) -> anyhow::Result<()> {
    if mirror.labels().get(LABEL).is_some_and(|manager| manager == MANAGER) {
        return Ok(());
    }
    let name = mirror.name_any();
    bail!(
        "`kubectl mirror on` has not made the Mirror {namespace}/{name}, so it is left alone; `kubectl -n {namespace} \
         delete mirror {name}` deletes it, and --name chooses another name"
    )
}

/// The name of the Mirror of a workload. A name that is too long or contains a dot gets a hash as its suffix.
fn name_of(workload: &Workload) -> String {
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

    use super::*;

    #[test]
    fn the_name_of_a_mirror_tells_its_workload() {
        assert_eq!(name_of(&"deployment/checkout".parse().unwrap()), "deploy-checkout");
        let [dot, dash] = ["svc/a.b", "svc/a-b"].map(|text| name_of(&text.parse().unwrap()));
        assert!(dot.starts_with("svc-a-b-") && dash == "svc-a-b", "{dot} {dash}");
    }

    proptest! {
        #[test]
        fn every_workload_has_a_name_that_a_mirror_can_have(
            kind in "(deploy|sts|ds|svc)",
            name in "[a-z0-9]([-a-z0-9.]{0,100}[a-z0-9])?",
            other in "[a-z0-9]([-a-z0-9.]{0,100}[a-z0-9])?",
        ) {
            let [one, two] = [&name, &other].map(|name| name_of(&format!("{kind}/{name}").parse().unwrap()));
            prop_assert!(one.parse::<Name>().is_ok(), "{one}");
            prop_assert_eq!(one == two, name == other);
        }
    }
}
