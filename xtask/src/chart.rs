//! Renders the Helm chart, and checks the result.
//!
//! This module does not use a cluster. The tests on a cluster check that the API server accepts the result, and that
//! the agent runs with it. `generate` and `lint` call this module.

use std::{fs, process::Command};

use anyhow::{Context as _, Result, bail};

use crate::{
    process::{Run as _, step},
    tools, workspace,
};

/// The oldest version in the chart's `kubeVersion`.
const OLDEST_KUBERNETES: &str = "1.25.0";
/// The manifest in `deploy/rendered` is for this version and newer ones.
const RENDERED_FOR: &str = "1.30.0";

/// Accepted values, and the text that the result must contain because of them.
const TAKEN: &[(&[&str], &str)] = &[
    (&[], "container.apparmor.security.beta.kubernetes.io/agent: unconfined"),
    (&["securityContext.appArmorProfile=null"], "kubectl.kubernetes.io/default-container: agent\n    spec:"),
    (&["enableMirror=true"], "name: MIRROR_ENABLE_MIRROR\n              value: \"true\""),
    (&["packets=100000000"], "name: MIRROR_PACKETS\n              value: \"100000000\""),
    (&["annotations=false"], "name: MIRROR_ANNOTATIONS\n              value: \"false\""),
    (&[], "name: clustermirrors.podmirror.io"),
    (&["fullnameOverride=other"], "name: other-edit"),
    (&["mirrorOffloads=false"], "name: MIRROR_OFFLOADS\n              value: \"off\""),
    (&["whenRead=true"], "name: MIRROR_WHEN_READ\n              value: \"true\""),
    (&["excludeNamespaces={a,b}"], "name: MIRROR_EXCLUDE_NAMESPACES\n              value: \"a,b\""),
    (&["allowNamespaces={a,b}"], "name: MIRROR_ALLOW_NAMESPACES\n              value: \"a,b\""),
    (&["filter=tcp port 443"], "name: MIRROR_FILTER\n              value: \"tcp port 443\""),
    (&["filter=(icmp6[icmp6type:1] = 0x80 or ip6 host fe80::A) and not ether src aa:bb:cc:dd:ee:0f"], "0x80"),
    (&["filter=tcp[tcpflags] & (tcp-syn|tcp-fin) != 0 && portrange 80-90 && net 10.0.0.0/8"], "tcp-syn"),
    (&["rate=10kpps\\,50Mbit\\,burst=100ms", "maxRate=1Gbit/s"], "value: \"10kpps,50Mbit,burst=100ms\""),
    (&["sample=1/100", "duration=1d12h", "bytes=1GiB", "snaplen=96"], "value: \"1/100\""),
    (&["sample=12.5%", "packets=100k"], "value: \"12.5%\""),
    (&["listen=0.0.0.0:9000", "podMonitor.enabled=true"], "kind: PodMonitor"),
    (&["listen=[::]:9000"], "host: \"::1\""),
    (&["streamListen="], "name: MIRROR_STREAM_LISTEN\n              value: \"\""),
    (&["image.repository=r.example/a", "image.tag=x"], "image: \"r.example/a:x\""),
    (&["image.pullSecrets[0].name=s"], "imagePullSecrets:\n        - name: s"),
    (
        &[],
        "key: kubernetes.io/arch\n                operator: In\n                values:\n                - amd64",
    ),
    (&["image.architectures={amd64,arm64}"], "                - amd64\n                - arm64"),
    (
        &[
            "targets.ids=ids0",
            "targets.all=pod:security/app.kubernetes.io/name=suricata/net1",
            "targets.far=vxlan:10.9.0.5:14789/vni=77",
            "targets.erspan=erspan:fd00::5/session=1-9",
        ],
        "name: MIRROR_TARGETS\n              value: \"all=pod:security/app.kubernetes.io/name=suricata/net1,erspan=erspan:fd00::5/session=1-9,far=vxlan:10.9.0.5:14789/vni=77,ids=ids0\"",
    ),
    (&["targets.live=stream"], "name: MIRROR_TARGETS\n              value: \"live=stream\""),
    (&["targets.live=stream", "mirrorTarget=live"], "name: MIRROR_TARGET\n              value: \"live\""),
    (&["maxPodRate=10kpps"], "name: MIRROR_MAX_POD_RATE\n              value: \"10kpps\""),
    (&["maxNamespaceRate=20kpps"], "name: MIRROR_MAX_NAMESPACE_RATE\n              value: \"20kpps\""),
    (&["listen=0.0.0.0:9000", "podMonitor.enabled=true"], "honorLabels: true"),
    (&["nodeSelector=null", "tolerations=null", "priorityClassName="], "kind: DaemonSet"),
    (&["serviceAccount.create=false", "serviceAccount.name=mine"], "serviceAccountName: mine"),
    (&["rbac.create=false", "serviceAccount.create=false"], "serviceAccountName: default"),
    (&["fullnameOverride=other"], "resourceNames: [other]"),
    (&["recorder.enabled=true"], "args: [recorder, --ring, 64MiB, --buffer, 4MiB]"),
    (
        &["recorder.enabled=true", "recorder.ring=16000MiB", "recorder.buffer=32MiB"],
        "args: [recorder, --ring, 16000MiB, --buffer, 32MiB]",
    ),
    (
        &["recorder.enabled=true"],
        "limits:\n              memory: 176Mi\n            requests:\n              cpu: 10m\n              memory: 96Mi",
    ),
    (
        &["recorder.enabled=true", "recorder.resources.limits.memory=1Gi"],
        "limits:\n              memory: 1Gi",
    ),
    (
        &["recorder.enabled=true", "targets.ids=ids0"],
        "name: MIRROR_TARGETS\n              value: \"ids=ids0,recorder=stream\"",
    ),
    (
        &["recorder.enabled=true", "targets.live=stream", "recorder.target=live"],
        "name: MIRROR_TARGETS\n              value: \"live=stream\"",
    ),
    (
        &["recorder.enabled=true", "recorder.target=live"],
        "name: MIRROR_RECORDER_TARGET\n              value: \"live\"",
    ),
    (&["extraEnv[0].name=MIRROR_ATTACH", "extraEnv[0].value=tcx"], "- name: MIRROR_ATTACH"),
];

/// As above, for the version of the manifest in `deploy/rendered`. With the oldest version the controller has nothing
/// to sum up.
const TAKEN_BY_NEWER: &[(&[&str], &str)] = &[
    (&["controller.replicas=2"], "kind: Deployment\nmetadata:\n  name: podmirror-controller"),
    (&["controller.enabled=false"], "kind: DaemonSet"),
    (&["fullnameOverride=other"], "resourceNames: [other-controller]"),
    (&["controller.listen=[::]:9000"], "name: MIRROR_LISTEN\n              value: \"[::]:9000\""),
    (&["controller.serviceAccount.create=false"], "serviceAccountName: default"),
    (&["rbac.create=false"], "kind: Deployment"),
    (&["rbac.create=false"], "name: podmirror-mirrornodes"),
    (&[], "an agent cannot set finalizers on a MirrorNode"),
    (&["maxMirrorDuration=1h30m"], "<= duration('1h30m')"),
];

/// Text that only the controller's manifests contain.
const OF_CONTROLLER: &str = "kind: Deployment";

/// Refused values, and a part of the error message.
const REFUSED: &[(&[&str], &str)] = &[
    (&["mirrorInterface=mirror0"], "mirrorInterface"),
    (&["mirrorIface=longer-than-15-bytes"], "mirrorIface"),
    (&["mirrorIfaceMtu=10"], "mirrorIfaceMtu"),
    (&["excludeNamespaces={Shop}"], "excludeNamespaces"),
    (&["listen=localhost"], "listen"),
    (&["streamListen=0.0.0.0:10707"], "streamListen"),
    (&["podMonitor.enabled=true"], "listen=0.0.0.0:10706"),
    (&["nodeSelector.kubernetes\\.io/arch=arm64"], "image.architectures={arm64}"),
    (&["image.architectures={x86_64}"], "architectures"),
    (&["targets.Ids=ids0"], "Ids"),
    (&["targets.ids=longer-than-15-bytes"], "targets"),
    (&["targets.ids=a=b"], "targets"),
    (&["targets.ids=pod:suricata"], "targets"),
    (&["targets.ids=vxlan:10.9.0.5"], "targets"),
    (&["targets.live=stream:1"], "targets"),
    (&["mirrorTarget=Live"], "mirrorTarget"),
    (&["recorder.enabled=true", "targets.recorder=ids0"], "targets.recorder is ids0"),
    (&["recorder.enabled=true", "recorder.target=default"], "recorder.target"),
    (&["recorder.target=Live"], "target"),
    (&["recorder.ring=64MB"], "ring"),
    (&["recorder.ring=16001MiB"], "ring"),
    (&["recorder.buffer=33MiB"], "buffer"),
    (&["filter=tpc port 443"], "unknown word \"tpc\""),
    (&["filter=(tcp or udp"], "filter: a \"(\" or a \")\" is missing"),
    (&["filter=tcp port"], "is incomplete"),
    (&["filter=tcp and"], "is incomplete"),
    (&["sample=0%"], "sample"),
    (&["sample=5/4"], "sample"),
    (&["sample=half"], "sample"),
    (&["rate=10k"], "rate"),
    (&["rate=0pps"], "rate"),
    (&["maxRate=fast"], "maxRate"),
    (&["snaplen=20"], "snaplen"),
    (&["duration=0s"], "duration"),
    (&["duration=soon"], "duration"),
    (&["packets=0"], "packets"),
    (&["bytes=1XB"], "bytes"),
    (&["listen=300.0.0.1:10706"], "listen"),
    (&["listen=127.0.0.1:70000"], "listen"),
    (&["listen=127.0.0.1:10707"], "use different ports"),
    (&["mirrorTarget=live"], "target \"live\" does not exist"),
    (&["targets.default=ids0"], "invalid propertyName 'default'"),
    (&["controller.listen=127.0.0.1:10706"], "listen"),
    (&["controller.listen=[::1]:10706"], "listen"),
    (&["maxMirrorDuration=0s"], "maxMirrorDuration"),
    (&["controller.listen=localhost:1"], "listen"),
    (&["maxMirrorDuration=1d"], "maxMirrorDuration"),
    (&["maxMirrorDuration=1h"], "maxMirrorDuration needs Kubernetes 1.30"),
];

/// Renders the chart with its default values, as `helm install podmirror --namespace podmirror` does.
pub(crate) fn rendered() -> Result<String> {
    template(&[], RENDERED_FOR)?.read()
}

/// Checks the chart with helm's own rules, and with the values above.
pub(crate) fn check() -> Result<()> {
    step("chart");
    let version = env!("CARGO_PKG_VERSION");
    let manifest = fs::read_to_string(workspace::root().join("deploy/chart/Chart.yaml"))?;
    for key in ["version", "appVersion"] {
        if !manifest.lines().any(|line| line == format!("{key}: {version}")) {
            bail!("deploy/chart/Chart.yaml does not say `{key}: {version}`, the workspace's version");
        }
    }
    helm()?.args(["lint", "--strict", "--quiet", "deploy/chart"]).run()?;
    let of_oldest = TAKEN.iter().map(|taken| (taken, OLDEST_KUBERNETES));
    for ((values, part), kubernetes) in
        of_oldest.chain(TAKEN_BY_NEWER.iter().map(|taken| (taken, RENDERED_FOR)))
    {
        let text = template(values, kubernetes)?.read()?;
        if !text.contains(part) {
            bail!("the chart with {} renders to something without {part:?}", values.join(" "));
        }
    }
    for (values, kubernetes) in [(&[][..], OLDEST_KUBERNETES), (&["controller.enabled=false"], RENDERED_FOR)]
    {
        if template(values, kubernetes)?.read()?.contains(OF_CONTROLLER) {
            bail!("the chart with {} has a controller for Kubernetes {kubernetes}", values.join(" "));
        }
    }
    for (values, part) in REFUSED {
        let output = template(values, OLDEST_KUBERNETES)?.output().context("helm")?;
        let told = String::from_utf8_lossy(&output.stderr);
        if output.status.success() {
            bail!("the chart takes {}", values.join(" "));
        }
        if !told.contains(part) {
            bail!("the chart refuses {} without naming {part:?}: {told}", values.join(" "));
        }
    }
    println!("    {} values rendered, {} refused", TAKEN.len() + TAKEN_BY_NEWER.len(), REFUSED.len());
    Ok(())
}

fn template(values: &[&str], kubernetes: &str) -> Result<Command> {
    let mut template = helm()?;
    template.args(["template", "podmirror", "deploy/chart", "--namespace", "podmirror"]);
    // A helm that Go has built without helm's own makefile assumes a very old cluster.
    template.args(["--kube-version", kubernetes]);
    template.args(values.iter().flat_map(|value| ["--set", value]));
    Ok(template)
}

/// helm in the work tree, without the user's settings and repositories.
fn helm() -> Result<Command> {
    let mut helm = tools::helm()?;
    helm.current_dir(workspace::root()).env("KUBECONFIG", "/dev/null");
    for name in ["HELM_CACHE_HOME", "HELM_CONFIG_HOME", "HELM_DATA_HOME"] {
        helm.env(name, workspace::root().join("target/helm"));
    }
    Ok(helm)
}
