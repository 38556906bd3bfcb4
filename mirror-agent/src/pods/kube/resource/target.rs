//! Converts MirrorTargets to destinations, through the syntax of `--target`. Pure.

use std::net::{IpAddr, SocketAddr};

use k8s_openapi::apimachinery::pkg::{apis::meta::v1::Time, util::intstr::IntOrString};
use mirror_api::{
    MirrorTarget, MirrorTargetSpec, TargetErspan, TargetGeneve, TargetGre, TargetOversize, TargetPod,
    TargetVxlan,
};
use mirror_core::destination::{Destination, device_name};
use serde::Deserialize as _;

use super::{Bounded, Kind, TOO_LARGE, nothing, selector, understood, without_nulls};
use crate::{
    model::{Name, Selector, TargetName, TargetResource},
    settings::parse_rate,
};

impl Kind for MirrorTarget {
    type Read = TargetResource;

    fn read(Bounded { object, is_too_large, .. }: &Bounded) -> Result<TargetResource, String> {
        let (metadata, spec) = (&object["metadata"], without_nulls(&object["spec"]));
        let name = metadata["name"].as_str().unwrap_or_default().parse::<Name>()?;
        let created = Time::deserialize(&metadata["creationTimestamp"]);
        let mut destination = match is_too_large {
            true => Err(TOO_LARGE.to_owned()),
            false => understood::<MirrorTargetSpec>(&spec).and_then(destination),
        };
        if name.is_default() {
            destination =
                Err("the target default is the device of --mirror-iface: use another name".to_owned());
        }
        let max_rate = match spec.get("maxRate").map(|rate| rate.as_str().unwrap_or_default()) {
            None => None,
            Some(text) => match parse_rate(text) {
                Ok(rate) => Some(rate),
                Err(problem) => {
                    destination = Err(format!("spec.maxRate: {problem}"));
                    None
                }
            },
        };
        let namespaces = match spec.get("allowedNamespaces") {
            None => Ok(Selector::default()),
            Some(allowed) => selector(allowed),
        };
        Ok(TargetResource {
            name: TargetName(name),
            uid: metadata["uid"].as_str().unwrap_or_default().to_owned(),
            generation: metadata["generation"].as_i64().unwrap_or_default(),
            created: created.map_or(0, |Time(time)| time.as_second()),
            namespaces: namespaces.unwrap_or_else(|problem| {
                destination = Err(format!("spec.allowedNamespaces: {problem}"));
                nothing()
            }),
            max_rate,
            destination,
        })
    }

    fn problem(_: &TargetResource) -> Option<String> {
        // The loop logs the problem, together with facts that only a node knows.
        None
    }
}

fn destination(spec: MirrorTargetSpec) -> Result<Destination, String> {
    let MirrorTargetSpec {
        device,
        pod,
        vxlan,
        geneve,
        gre,
        erspan,
        oversize,
        allowed_namespaces: _,
        max_rate: _,
    } = spec;
    let device = device.map(|device| {
        let name = device_name(&device.name).map_err(|error| format!("spec.device.name: {error}"))?;
        Ok(Destination::Device(name))
    });
    let tunnels = [
        vxlan.map(|TargetVxlan { remote, port, vni, device }| {
            tunnel("vxlan", &remote, Some(port), ("vni", &vni), [named("device", device)], oversize)
        }),
        geneve.map(|TargetGeneve { remote, port, vni, identity, device }| {
            let identity = identity.unwrap_or(false).then(|| "identity=true".to_owned());
            tunnel(
                "geneve",
                &remote,
                Some(port),
                ("vni", &vni),
                [identity, named("device", device)],
                oversize,
            )
        }),
        gre.map(|TargetGre { remote, key, device }| {
            tunnel("gre", &remote, None, ("key", &key), [named("device", device)], oversize)
        }),
        erspan.map(|TargetErspan { remote, session, device }| {
            tunnel("erspan", &remote, None, ("session", &session), [named("device", device)], oversize)
        }),
    ];
    let is_tunnel = tunnels.iter().any(Option::is_some);
    let mut all = tunnels.into_iter().chain([device, pod.map(self::pod)]).flatten();
    match (all.next(), all.next()) {
        (Some(_), None) if oversize.is_some() && !is_tunnel => {
            Err("spec.oversize: only a tunnel has it".to_owned())
        }
        (Some(destination), None) => destination,
        _ => Err("spec: use exactly one of device, pod, vxlan, geneve, gre and erspan".to_owned()),
    }
}

fn pod(TargetPod { namespace, name, label, nic }: TargetPod) -> Result<Destination, String> {
    let which = match (name, label) {
        (Some(name), None) if !name.contains('=') => name,
        (None, Some(label)) if label.contains('=') => label,
        _ => return Err("spec.pod: use exactly one of name and label, as in app=suricata".to_owned()),
    };
    let nic = nic.map(|nic| format!("/{nic}")).unwrap_or_default();
    format!("pod:{namespace}/{which}{nic}").parse().map_err(|error| format!("spec.pod: {error}"))
}

fn tunnel(
    kind: &str,
    remote: &str,
    port: Option<i32>,
    (word, key): (&str, &IntOrString),
    options: impl IntoIterator<Item = Option<String>>,
    oversize: Option<TargetOversize>,
) -> Result<Destination, String> {
    let ip: IpAddr =
        remote.parse().map_err(|_| format!("spec.{kind}.remote: {remote:?} is not an IP address"))?;
    let mut text = match port {
        None => format!("{kind}:{ip}"),
        Some(port) => {
            let number = u16::try_from(port).ok();
            let number = number.ok_or_else(|| format!("spec.{kind}.port: {port} is not a port"))?;
            format!("{kind}:{}", SocketAddr::new(ip, number))
        }
    };
    let key = match key {
        IntOrString::Int(key) => key.to_string(),
        IntOrString::String(keys) => keys.clone(),
    };
    let oversize = oversize.map(|oversize| match oversize {
        TargetOversize::Truncate => "truncate",
        TargetOversize::Segment => "segment",
        TargetOversize::Fragment => "fragment",
        TargetOversize::Drop => "drop",
    });
    let options = options.into_iter().chain([Some(format!("{word}={key}")), named("oversize", oversize)]);
    for option in options.flatten() {
        if option.contains('/') {
            return Err(format!("spec.{kind}: {option:?} has a slash"));
        }
        text.push('/');
        text.push_str(&option);
    }
    text.parse().map_err(|error| format!("spec.{kind}: {error}"))
}

/// Returns an option of a tunnel, if it has a value.
fn named(word: &str, value: Option<impl ToString>) -> Option<String> {
    value.map(|value| format!("{word}={}", value.to_string()))
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "tests panic")]

    use proptest::prelude::*;
    use serde_json::{Value, json};

    use super::*;

    fn read(spec: &Value) -> TargetResource {
        let object = json!({ "metadata": { "name": "ids" }, "spec": spec });
        MirrorTarget::read(&Bounded { object, is_too_large: false, size: 0 }).unwrap()
    }

    #[test]
    fn each_kind_of_target_is_a_destination_of_the_flag() {
        let tunnel = |kind: &str, more: Value, oversize: Option<&str>| {
            let mut of = json!({ "remote": "10.9.0.5" });
            of.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            json!({ kind: of, "oversize": oversize })
        };
        for (spec, expected) in [
            (json!({ "device": { "name": "ids0" } }), "ids0"),
            (json!({ "pod": { "namespace": "security", "name": "ids-0" } }), "pod:security/ids-0"),
            (
                json!({ "pod": { "namespace": "security", "label": "k8s.io/app=ids", "nic": "net1" } }),
                "pod:security/k8s.io/app=ids/net1",
            ),
            (tunnel("vxlan", json!({ "port": 14789, "vni": 77 }), None), "vxlan:10.9.0.5:14789/vni=77"),
            (
                tunnel(
                    "vxlan",
                    json!({ "remote": "fd00::5", "port": 14789, "vni": "100-199", "device": "vx0" }),
                    None,
                ),
                "vxlan:[fd00::5]:14789/vni=100-199/device=vx0",
            ),
            (
                tunnel("geneve", json!({ "port": 16081, "vni": "7", "identity": true }), Some("Truncate")),
                "geneve:10.9.0.5:16081/vni=7/identity=true/oversize=truncate",
            ),
            (tunnel("gre", json!({ "key": 77 }), Some("Fragment")), "gre:10.9.0.5/key=77/oversize=fragment"),
            (
                tunnel("erspan", json!({ "remote": "fd00::5", "session": 7 }), Some("Drop")),
                "erspan:fd00::5/session=7/oversize=drop",
            ),
        ] {
            let TargetResource { name, destination, namespaces, .. } = read(&spec);
            assert_eq!(name.to_string(), "ids");
            assert_eq!(destination, expected.parse(), "{spec}");
            assert_eq!(destination.unwrap().to_string(), expected);
            assert_eq!(namespaces, Selector::default(), "for all namespaces");
        }
    }

    #[test]
    fn what_cannot_be_a_target_says_why() {
        let vxlan = |more: Value| {
            let mut of = json!({ "remote": "10.9.0.5", "port": 14789, "vni": 77 });
            of.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            json!({ "vxlan": of })
        };
        for (spec, part) in [
            (json!({}), "exactly one of device, pod"),
            (
                json!({ "device": { "name": "a" }, "pod": { "namespace": "a", "name": "b" } }),
                "exactly one of device",
            ),
            (json!({ "device": { "name": "a b" } }), "spec.device.name: "),
            (json!({ "device": { "name": "a" }, "oversize": "Drop" }), "only a tunnel has it"),
            (json!({ "pod": { "namespace": "a" } }), "exactly one of name and label"),
            (
                json!({ "pod": { "namespace": "a", "name": "b", "label": "c=d" } }),
                "exactly one of name and label",
            ),
            (json!({ "pod": { "namespace": "a", "name": "b=c" } }), "exactly one of name and label"),
            (
                vxlan(json!({ "remote": "ids.example" })),
                "spec.vxlan.remote: \"ids.example\" is not an IP address",
            ),
            (vxlan(json!({ "remote": "127.0.0.1" })), "is not an address of another node"),
            (vxlan(json!({ "port": 65536 })), "spec.vxlan.port: 65536 is not a port"),
            (vxlan(json!({ "vni": "9-1" })), "use a number from 1 to 16777215"),
            (vxlan(json!({ "vni": "7/oversize=drop" })), "has a slash"),
            (vxlan(json!({ "device": "a/oversize=drop" })), "has a slash"),
            (
                vxlan(json!({ "ttl": 5 })),
                "spec.vxlan.ttl: this version of the agent does not know this field",
            ),
            (json!({ "sflow": { "remote": "10.9.0.5" } }), "spec.sflow: this version"),
        ] {
            let why = read(&spec).destination.unwrap_err();
            assert!(why.contains(part), "{spec}: {why}");
        }
        let named = |name: &str| {
            let object = json!({ "metadata": { "name": name }, "spec": { "device": { "name": "a" } } });
            MirrorTarget::read(&Bounded { object, is_too_large: false, size: 0 })
        };
        assert!(named("default").unwrap().destination.unwrap_err().contains("use another name"));
        assert!(named("a.b").is_err());
    }

    #[test]
    fn the_limit_is_that_of_the_flags_or_the_target_is_refused() {
        let of = |rate: Value| read(&json!({ "device": { "name": "a" }, "maxRate": rate }));
        let target = of(json!("200kpps,1Gbit"));
        assert_eq!((target.max_rate, target.destination.is_ok()), (parse_rate("200kpps,1Gbit").ok(), true));
        for bad in [json!("fast"), json!(""), json!(200)] {
            let why = of(bad.clone()).destination.unwrap_err();
            assert!(why.contains("maxRate"), "{bad}: {why}");
        }
        assert_eq!(of(Value::Null).max_rate, None);
    }

    #[test]
    fn a_selector_that_cannot_be_read_lets_no_namespace_in() {
        let target = read(&json!({
            "device": { "name": "a" },
            "allowedNamespaces": { "matchExpressions": [{ "key": "a", "operator": "Like", "values": ["b"] }] },
        }));
        assert!(
            target
                .destination
                .unwrap_err()
                .starts_with("spec.allowedNamespaces: \"Like\" is not an operator")
        );
        assert!(!target.namespaces.matches(&[("a".to_owned(), "b".to_owned())].into()));
        let none =
            read(&json!({ "device": { "name": "a" }, "allowedNamespaces": { "matchLabels": { "a": "b" } } }));
        assert!(none.namespaces.matches(&[("a".to_owned(), "b".to_owned())].into()));
        assert!(!none.namespaces.matches(&Default::default()));
    }

    proptest! {
        /// The text of a field never becomes a separate option of the tunnel: a target has the values of the fields, or
        /// is refused.
        #[test]
        fn a_field_is_one_option(remote in "\\PC{0,20}", vni in "\\PC{0,12}", device in "\\PC{0,16}") {
            let spec = json!({ "vxlan": { "remote": remote, "port": 14789, "vni": vni, "device": device } });
            if let Ok(destination) = read(&spec).destination {
                let tunnel = destination.tunnel().unwrap();
                prop_assert_eq!(Ok(tunnel.remote), remote.parse::<IpAddr>());
                prop_assert_eq!(tunnel.existing.as_deref(), Some(device.as_str()));
                prop_assert_eq!(tunnel.oversize, mirror_core::tunnel::Oversize::Segment);
            }
        }
    }
}
