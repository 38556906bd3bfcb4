//! Values of the chart, and the outcome of rendering it with them.

/// The oldest version in the chart's `kubeVersion`.
pub(super) const OLDEST_KUBERNETES: &str = "1.25.0";

/// An address that Prometheus can reach.
const LISTEN: &str = "metrics.listen=0.0.0.0:9000";

/// Accepted values, and the text that the result must contain because of them.
pub(super) const TAKEN: &[(&[&str], &str)] = &[
    (&[], "container.apparmor.security.beta.kubernetes.io/agent: unconfined"),
    (&["securityContext.appArmorProfile=null"], "kubectl.kubernetes.io/default-container: agent\n    spec:"),
    (&["enableMirror=true"], "name: PODMIRROR_ENABLE_MIRROR\n              value: \"true\""),
    (&["defaults.packets=100000000"], "name: PODMIRROR_PACKETS\n              value: \"100000000\""),
    (&["annotationMirroring.enabled=false"], "name: PODMIRROR_ANNOTATIONS\n              value: \"false\""),
    (&["kubeOvnAnnotations=true"], "name: PODMIRROR_KUBE_OVN_ANNOTATIONS\n              value: \"true\""),
    (&[], "name: clustermirrors.podmirror.io"),
    (&["fullnameOverride=other"], "name: other-edit"),
    (&["mirrorInterface.name=ids0"], "name: PODMIRROR_MIRROR_IFACE\n              value: \"ids0\""),
    (&["mirrorInterface.mtu=9000"], "name: PODMIRROR_MIRROR_IFACE_MTU\n              value: \"9000\""),
    (&["mirrorInterface.offloads=false"], "name: PODMIRROR_MIRROR_OFFLOADS\n              value: \"false\""),
    (&["mirrorInterface.whenRead=true"], "name: PODMIRROR_WHEN_READ\n              value: \"true\""),
    (&["excludeNamespaces={a,b}"], "name: PODMIRROR_EXCLUDE_NAMESPACES\n              value: \"a,b\""),
    (&["allowNamespaces={a,b}"], "name: PODMIRROR_ALLOW_NAMESPACES\n              value: \"a,b\""),
    (&["defaults.filter=tcp port 443"], "name: PODMIRROR_FILTER\n              value: \"tcp port 443\""),
    (
        &[
            "defaults.filter=(icmp6[icmp6type:1] = 0x80 or ip6 host fe80::A) and not ether src aa:bb:cc:dd:ee:0f",
        ],
        "0x80",
    ),
    (
        &["defaults.filter=tcp[tcpflags] & (tcp-syn|tcp-fin) != 0 && portrange 80-90 && net 10.0.0.0/8"],
        "tcp-syn",
    ),
    (
        &["defaults.rate=10kpps\\,50Mbit\\,burst=100ms", "ceilings.maxRate=1Gbit/s"],
        "value: \"10kpps,50Mbit,burst=100ms\"",
    ),
    (&["defaults.sample=1/100", "defaults.duration=1d12h", "defaults.bytes=1GiB"], "value: \"1/100\""),
    (&["defaults.sample=12.5%", "defaults.packets=100k"], "value: \"12.5%\""),
    (&["defaults.snapLength=96"], "name: PODMIRROR_SNAPLEN\n              value: \"96\""),
    (&["ceilings.maxPodRate=10kpps"], "name: PODMIRROR_MAX_POD_RATE\n              value: \"10kpps\""),
    (
        &["ceilings.maxNamespaceRate=20kpps"],
        "name: PODMIRROR_MAX_NAMESPACE_RATE\n              value: \"20kpps\"",
    ),
    (&["streamListen="], "name: PODMIRROR_STREAM_LISTEN\n              value: \"\""),
    (&["log.level=debug", "log.format=text"], "name: PODMIRROR_LOG\n              value: \"debug\""),
    (&["image.repository=r.example/a", "image.tag=x"], "image: \"r.example/a:x\""),
    (
        &[
            "image.tag=x",
            "image.digest=sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
        ],
        "mirror-agent:x@sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855\"",
    ),
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
        "name: PODMIRROR_DEFINE_TARGET\n              value: \"all=pod:security/app.kubernetes.io/name=suricata/net1,erspan=erspan:fd00::5/session=1-9,far=vxlan:10.9.0.5:14789/vni=77,ids=ids0\"",
    ),
    (&["targets.live=stream", "target=live"], "name: PODMIRROR_TARGET\n              value: \"live\""),
    (&["nodeSelector=null", "tolerations=null", "priorityClassName="], "kind: DaemonSet"),
    (&["serviceAccount.create=false", "serviceAccount.name=mine"], "serviceAccountName: mine"),
    (&["rbac.create=false", "serviceAccount.create=false"], "serviceAccountName: default"),
    (&["fullnameOverride=other"], "resourceNames: [other]"),
    (&["recorder.enabled=true"], "args: [recorder, --ring, 64Mi, --buffer, 4Mi]"),
    (
        &["recorder.enabled=true", "recorder.ring=16000MiB", "recorder.buffer=32Mi"],
        "args: [recorder, --ring, 16000MiB, --buffer, 32Mi]",
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
        "name: PODMIRROR_DEFINE_TARGET\n              value: \"ids=ids0,recorder=stream\"",
    ),
    (
        &["recorder.enabled=true", "targets.live=stream", "recorder.target=live"],
        "name: PODMIRROR_DEFINE_TARGET\n              value: \"live=stream\"",
    ),
    (
        &["recorder.enabled=true", "recorder.target=live"],
        "env:\n            - name: PODMIRROR_TARGET\n              value: \"live\"",
    ),
    (&["extraArgs={--attach=tcx}"], "args: [run, \"--attach=tcx\"]"),
    (&["extraEnv[0].name=X", "extraEnv[0].value=y"], "            - name: X\n              value: \"y\""),
    (
        &["extraVolumes[0].name=v", "extraVolumeMounts[0].name=v", "extraVolumeMounts[0].mountPath=/v"],
        "            - mountPath: /v\n              name: v",
    ),
    (&["commonLabels.team=net", "podLabels.x=y"], "        team: net\n        x: \"y\"\n"),
    (&["commonAnnotations.owner=me"], "  annotations:\n    owner: me\nspec:\n  selector:"),
    (&["metrics.listen=[::]:9000"], "host: \"::1\""),
    (&["metrics.perPod=false"], "name: PODMIRROR_METRICS_PER_POD\n              value: \"false\""),
    (
        &[LISTEN, "metrics.serviceMonitor.enabled=true", "metrics.labels.release=prometheus"],
        "    release: prometheus\nspec:\n  selector:\n    matchLabels:\n",
    ),
    (
        &[
            LISTEN,
            "metrics.podMonitor.enabled=true",
            "metrics.scrapeTimeout=9s",
            "metrics.metricRelabelings[0].action=drop",
        ],
        "      metricRelabelings:\n      - action: drop\n",
    ),
    (&["priorityClassQuota=true"], "values: [\"system-node-critical\"]"),
    (&["openshift.scc=true", "serviceAccount.name=mine"], "kind: SecurityContextConstraints"),
];

/// As above, for the version of the manifest in `deploy/rendered`. With the oldest version the controller has nothing
/// to sum up.
pub(super) const TAKEN_BY_NEWER: &[(&[&str], &str)] = &[
    (&[], "kind: Deployment\nmetadata:\n  name: podmirror-controller"),
    (&["controller.replicas=2"], "kind: PodDisruptionBudget"),
    (&["controller.enabled=false"], "kind: DaemonSet"),
    (&["fullnameOverride=other"], "resourceNames: [other-controller]"),
    (&[], "name: PODMIRROR_LISTEN\n              value: \"0.0.0.0:10706\""),
    (&["controller.listen=[::]:9000"], "name: PODMIRROR_LISTEN\n              value: \"[::]:9000\""),
    (&["controller.serviceAccount.create=false"], "serviceAccountName: default"),
    (&["rbac.create=false"], "kind: Deployment"),
    (&["rbac.create=false"], "name: podmirror-mirrornodes"),
    (&[], "an agent cannot set finalizers on a MirrorNode"),
    (&["controller.extraArgs={--log=debug}"], "args: [controller, \"--log=debug\"]"),
    (
        &["controller.extraEnv[0].name=X", "controller.extraEnv[0].value=y"],
        "            - name: X\n              value: \"y\"\n          ports:\n            - name: metrics\n              containerPort: 10706",
    ),
    (
        &[
            "controller.extraVolumes[0].name=v",
            "controller.extraVolumeMounts[0].name=v",
            "controller.extraVolumeMounts[0].mountPath=/v",
        ],
        "          volumeMounts:\n            - mountPath: /v\n              name: v\n      volumes:\n        - name: v\n",
    ),
    (&["ceilings.maxMirrorDuration=1h30m"], "<= duration('1h30m')"),
    (
        &["networkPolicy.enabled=true", "networkPolicy.apiServerPorts={6443}"],
        "egress:\n    - ports:\n        - port: 6443\n",
    ),
    (&["networkPolicy.enabled=true", "networkPolicy.from[0].namespaceSelector.a=b"], "      from:\n"),
    // Without a monitor, the targets of the alerts would have no label node.
    (
        &[LISTEN, "metrics.podMonitor.enabled=true", "metrics.prometheusRule.enabled=true"],
        "kind: PrometheusRule",
    ),
];

/// Values and a version of Kubernetes, and a text that the result must not contain.
pub(super) const WITHOUT: &[(&[&str], &str, &str)] = &[
    (&[], OLDEST_KUBERNETES, "kind: Deployment"),
    (&["controller.enabled=false"], "1.30.0", "kind: Deployment"),
    (&[], "1.30.0", "kind: ResourceQuota"),
    (&["priorityClassQuota=true", "priorityClassName="], "1.30.0", "kind: ResourceQuota"),
    (&["controller.replicas=1"], "1.30.0", "kind: PodDisruptionBudget"),
    (&["openshift.scc=true"], "1.30.0", "runAsUser: 65532"),
];

/// Refused values, and a part of the error message.
pub(super) const REFUSED: &[(&[&str], &str)] = &[
    (&["mirrorIface=mirror0"], "mirrorIface"),
    (&["mirrorInterface.name=longer-than-15-bytes"], "mirrorInterface"),
    (&["mirrorInterface.mtu=10"], "mirrorInterface"),
    (&["excludeNamespaces={Shop}"], "excludeNamespaces"),
    (&["metrics.listen=localhost"], "listen"),
    (&["metrics.listen=300.0.0.1:10706"], "listen"),
    (&["metrics.listen=127.0.0.1:70000"], "listen"),
    (&["metrics.listen=127.0.0.1:10707"], "use different ports"),
    (&["streamListen=0.0.0.0:10707"], "streamListen"),
    (&["metrics.podMonitor.enabled=true"], "metrics.listen=0.0.0.0:10706"),
    (&["metrics.serviceMonitor.enabled=true"], "metrics.listen=0.0.0.0:10706"),
    (
        &[LISTEN, "metrics.podMonitor.enabled=true", "metrics.serviceMonitor.enabled=true"],
        "enable one of them",
    ),
    (&["metrics.interval=soon"], "interval"),
    (&["nodeSelector.kubernetes\\.io/arch=arm64"], "image.architectures={arm64}"),
    (&["image.architectures={x86_64}"], "architectures"),
    (&["image.digest=latest"], "digest"),
    (&["targets.Ids=ids0"], "Ids"),
    (&["targets.ids=longer-than-15-bytes"], "targets"),
    (&["targets.ids=a=b"], "targets"),
    (&["targets.ids=pod:suricata"], "targets"),
    (&["targets.ids=vxlan:10.9.0.5"], "targets"),
    (&["targets.live=stream:1"], "targets"),
    (&["targets.default=ids0"], "invalid propertyName 'default'"),
    (&["target=Live"], "target"),
    (&["target=live"], "target: \"live\" does not exist"),
    (&["recorder.enabled=true", "targets.recorder=ids0"], "targets.recorder is ids0"),
    (&["recorder.enabled=true", "recorder.target=default"], "recorder.target"),
    (&["recorder.target=Live"], "target"),
    (&["recorder.ring=64MB"], "ring"),
    (&["recorder.ring=16001Mi"], "ring"),
    (&["recorder.buffer=33Mi"], "buffer"),
    (&["defaults.filter=tpc port 443"], "unknown word \"tpc\""),
    (&["defaults.filter=(tcp or udp"], "filter: a \"(\" or a \")\" is missing"),
    (&["defaults.filter=tcp port"], "is incomplete"),
    (&["defaults.filter=tcp and"], "is incomplete"),
    (&["defaults.sample=0%"], "sample"),
    (&["defaults.sample=5/4"], "sample"),
    (&["defaults.sample=half"], "sample"),
    (&["defaults.rate=10k"], "rate"),
    (&["defaults.rate=0pps"], "rate"),
    (&["defaults.snapLength=20"], "snapLength"),
    (&["defaults.duration=0s"], "duration"),
    (&["defaults.duration=soon"], "duration"),
    (&["defaults.packets=0"], "packets"),
    (&["defaults.bytes=1XB"], "bytes"),
    (&["ceilings.maxRate=fast"], "maxRate"),
    (&["ceilings.maxMirrorDuration=0s"], "maxMirrorDuration"),
    (&["ceilings.maxMirrorDuration=1d"], "maxMirrorDuration"),
    (&["ceilings.maxMirrorDuration=1h"], "maxMirrorDuration needs Kubernetes 1.30"),
    (&["controller.listen=127.0.0.1:10706"], "listen"),
    (&["controller.listen=[::1]:10706"], "listen"),
    (&["controller.listen=localhost:1"], "listen"),
    (&["commonLabels.app\\.kubernetes\\.io/name=x"], "invalid propertyName 'app.kubernetes.io/name'"),
    (&["podLabels.app\\.kubernetes\\.io/component=x"], "invalid propertyName 'app.kubernetes.io/component'"),
    (&["networkPolicy.apiServerPorts=[]"], "apiServerPorts"),
];
