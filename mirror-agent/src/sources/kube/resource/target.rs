//! Converts MirrorTargets to destinations, through the syntax of `--define-target`. Pure.

use std::net::{IpAddr, SocketAddr};

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use mirror_api::{
    AllowedNamespaces, FromNamespaces, KeyRange, MirrorTarget, MirrorTargetSpec, TargetErspan, TargetGeneve,
    TargetGre, TargetOversize, TargetPod, TargetVxlan,
};
use mirror_core::destination::{Destination, device_name};
use serde::Deserialize as _;

use super::{Bounded, Kind, TOO_LARGE, selector, understood};
use crate::{
    model::{Name, Selector, TargetName, TargetResource},
    settings::Rate,
};

impl Kind for MirrorTarget {
    type Read = TargetResource;

    fn read(Bounded { object, is_too_large, .. }: &Bounded) -> Result<TargetResource, String> {
        let metadata = &object["metadata"];
        let name = metadata["name"].as_str().unwrap_or_default().parse::<Name>()?;
        let created = Time::deserialize(&metadata["creationTimestamp"]);
        let read = match is_too_large {
            _ if name.is_default() => {
                Err("the target default is the device of --mirror-iface: use another name".to_owned())
            }
            true => Err(TOO_LARGE.to_owned()),
            false => understood(&object["spec"]).and_then(read),
        };
        let (destination, namespaces, max_rate) = match read {
            Ok((destination, namespaces, max_rate)) => (Ok(destination), namespaces, max_rate),
            Err(problem) => (Err(problem), Selector::nothing(), None),
        };
        Ok(TargetResource {
            name: TargetName(name),
            uid: metadata["uid"].as_str().unwrap_or_default().to_owned(),
            generation: metadata["generation"].as_i64().unwrap_or_default(),
            created: created.map_or(0, |Time(time)| time.as_second()),
            namespaces,
            max_rate,
            destination,
        })
    }

    fn problem(_: &TargetResource) -> Option<String> {
        // The loop logs the problem, together with facts that only a node knows.
        None
    }
}

/// Reads a spec: the destination, the namespaces that can use it, and the limit.
fn read(spec: MirrorTargetSpec) -> Result<(Destination, Selector, Option<Rate>), String> {
    let MirrorTargetSpec {
        device,
        pod,
        vxlan,
        geneve,
        gre,
        erspan,
        oversize,
        allowed_namespaces,
        rate_limit,
    } = spec;
    let device = device.map(|device| {
        let name = device_name(&device.name).map_err(|error| format!("spec.device.name: {error}"))?;
        Ok(Destination::Device(name))
    });
    let tunnels = [
        vxlan.map(|TargetVxlan { remote_ip, destination_port, vni, vni_range, device }| {
            let keys = ("vni", vni, vni_range);
            tunnel("vxlan", &remote_ip, Some(destination_port), keys, None, device, oversize)
        }),
        geneve.map(|TargetGeneve { remote_ip, destination_port, vni, vni_range, identity, device }| {
            let keys = ("vni", vni, vni_range);
            tunnel("geneve", &remote_ip, Some(destination_port), keys, identity, device, oversize)
        }),
        gre.map(|TargetGre { remote_ip, key, key_range, device }| {
            tunnel("gre", &remote_ip, None, ("key", key, key_range), None, device, oversize)
        }),
        erspan.map(|TargetErspan { remote_ip, session_id, session_id_range, device }| {
            let keys = ("session", session_id, session_id_range);
            tunnel("erspan", &remote_ip, None, keys, None, device, oversize)
        }),
    ];
    let is_tunnel = tunnels.iter().any(Option::is_some);
    let mut all = tunnels.into_iter().chain([device, pod.map(self::pod)]).flatten();
    let destination = match (all.next(), all.next()) {
        (Some(_), None) if oversize.is_some() && !is_tunnel => {
            return Err("spec.oversize: only a tunnel has it".to_owned());
        }
        (Some(destination), None) => destination?,
        _ => return Err("spec: use exactly one of device, pod, vxlan, geneve, gre and erspan".to_owned()),
    };
    let rate = rate_limit.map(|limit| limit.read().map_err(|problem| format!("spec.{problem}")));
    Ok((destination, namespaces(allowed_namespaces)?, rate.transpose()?))
}

/// The namespaces whose Mirrors and annotations can use the target.
fn namespaces(allowed: Option<AllowedNamespaces>) -> Result<Selector, String> {
    match allowed.map(|AllowedNamespaces { from, selector }| (from, selector)) {
        None => Ok(Selector::nothing()),
        Some((FromNamespaces::All, None)) => Ok(Selector::default()),
        Some((FromNamespaces::Selector, Some(labels))) => {
            selector(labels).map_err(|problem| format!("spec.allowedNamespaces.selector: {problem}"))
        }
        Some(_) => {
            Err("spec.allowedNamespaces: use selector with from: Selector, and only with it".to_owned())
        }
    }
}

fn pod(TargetPod { namespace, name, pod_selector, nic }: TargetPod) -> Result<Destination, String> {
    let which = match (name, pod_selector) {
        (Some(name), None) if !name.contains('=') => name,
        (None, Some(selector)) if !selector.match_labels.is_empty() => {
            let labels = selector.match_labels.into_iter().map(|(key, value)| format!("{key}={value}"));
            labels.collect::<Vec<_>>().join(",")
        }
        _ => return Err("spec.pod: use exactly one of name and podSelector".to_owned()),
    };
    let nic = nic.map(|nic| format!("/{nic}")).unwrap_or_default();
    format!("pod:{namespace}/{which}{nic}").parse().map_err(|error| format!("spec.pod: {error}"))
}

fn tunnel(
    kind: &str,
    remote: &str,
    port: Option<i32>,
    (word, key, range): (&str, Option<i64>, Option<KeyRange>),
    identity: Option<bool>,
    device: Option<String>,
    oversize: Option<TargetOversize>,
) -> Result<Destination, String> {
    let ip: IpAddr =
        remote.parse().map_err(|_| format!("spec.{kind}.remoteIP: {remote:?} is not an IP address"))?;
    let mut text = match port {
        None => format!("{kind}:{ip}"),
        Some(port) => {
            let number = u16::try_from(port).ok();
            let number =
                number.ok_or_else(|| format!("spec.{kind}.destinationPort: {port} is not a port"))?;
            format!("{kind}:{}", SocketAddr::new(ip, number))
        }
    };
    let key = match (key, range) {
        (Some(key), None) => key.to_string(),
        (None, Some(KeyRange { min, max })) => format!("{min}-{max}"),
        _ => {
            let field = if word == "session" { "sessionID" } else { word };
            return Err(format!("spec.{kind}: use exactly one of {field} and {field}Range"));
        }
    };
    let options = [identity.unwrap_or(false).then(|| "identity=true".to_owned()), named("device", device)];
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
            let mut of = json!({ "remoteIP": "10.9.0.5" });
            of.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            let mut spec = json!({ kind: of, "allowedNamespaces": { "from": "All" } });
            spec.as_object_mut().unwrap().extend(oversize.map(|word| ("oversize".to_owned(), json!(word))));
            spec
        };
        for (spec, expected) in [
            (json!({ "device": { "name": "ids0" } }), "ids0"),
            (json!({ "pod": { "namespace": "security", "name": "ids-0" } }), "pod:security/ids-0"),
            (
                json!({ "pod": { "namespace": "security", "podSelector": { "matchLabels": { "k8s.io/app": "ids", "a": "b" } }, "nic": "net1" } }),
                "pod:security/a=b,k8s.io/app=ids/net1",
            ),
            (
                tunnel("vxlan", json!({ "destinationPort": 14789, "vni": 77 }), None),
                "vxlan:10.9.0.5:14789/vni=77",
            ),
            (
                tunnel(
                    "vxlan",
                    json!({ "remoteIP": "fd00::5", "destinationPort": 14789, "vniRange": { "min": 100, "max": 199 }, "device": "vx0" }),
                    None,
                ),
                "vxlan:[fd00::5]:14789/vni=100-199/device=vx0",
            ),
            (
                tunnel(
                    "geneve",
                    json!({ "destinationPort": 16081, "vni": 7, "identity": true }),
                    Some("Truncate"),
                ),
                "geneve:10.9.0.5:16081/vni=7/identity=true/oversize=truncate",
            ),
            (tunnel("gre", json!({ "key": 77 }), Some("Fragment")), "gre:10.9.0.5/key=77/oversize=fragment"),
            (
                tunnel("erspan", json!({ "remoteIP": "fd00::5", "sessionID": 7 }), Some("Drop")),
                "erspan:fd00::5/session=7/oversize=drop",
            ),
        ] {
            let TargetResource { name, destination, namespaces, .. } = read(&spec);
            assert_eq!(name.to_string(), "ids");
            assert_eq!(destination, expected.parse(), "{spec}");
            assert_eq!(destination.unwrap().to_string(), expected);
            let is_open = spec.get("allowedNamespaces").is_some();
            assert_eq!(namespaces, if is_open { Selector::default() } else { Selector::nothing() });
        }
    }

    #[test]
    fn what_cannot_be_a_target_says_why() {
        let vxlan = |more: Value| {
            let mut of = json!({ "remoteIP": "10.9.0.5", "destinationPort": 14789, "vni": 77 });
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
            (json!({ "pod": { "namespace": "a" } }), "exactly one of name and podSelector"),
            (
                json!({ "pod": { "namespace": "a", "name": "b", "podSelector": { "matchLabels": { "c": "d" } } } }),
                "exactly one of name and podSelector",
            ),
            (json!({ "pod": { "namespace": "a", "name": "b=c" } }), "exactly one of name and podSelector"),
            (
                vxlan(json!({ "remoteIP": "ids.example" })),
                "spec.vxlan.remoteIP: \"ids.example\" is not an IP address",
            ),
            (vxlan(json!({ "remoteIP": "127.0.0.1" })), "is not an address of another node"),
            (vxlan(json!({ "destinationPort": 65536 })), "spec.vxlan.destinationPort: 65536 is not a port"),
            (vxlan(json!({ "vni": 16_777_216 })), "use a number from 1 to 16777215"),
            (vxlan(json!({ "vniRange": { "min": 1, "max": 9 } })), "exactly one of vni and vniRange"),
            (
                json!({ "erspan": { "remoteIP": "10.9.0.5", "sessionIDRange": { "min": 9, "max": 1 } } }),
                "use a number from 1 to 1023",
            ),
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
    fn the_limit_is_that_of_a_mirror_or_the_target_is_refused() {
        let of = |rate: Value| read(&json!({ "device": { "name": "a" }, "rateLimit": rate }));
        let target = of(json!({ "packetsPerSecond": "200k", "bitsPerSecond": "1G" }));
        let expected = mirror_core::settings::parse_rate("200kpps,1Gbit").ok();
        assert_eq!((target.max_rate, target.destination.is_ok()), (expected, true));
        for bad in [json!({ "packetsPerSecond": "fast" }), json!({}), json!("200kpps")] {
            let (target, why) = (of(bad.clone()), of(bad.clone()).destination.unwrap_err());
            assert!(target.max_rate.is_none() && why.starts_with("spec"), "{bad}: {why}");
        }
    }

    #[test]
    fn a_selector_that_cannot_be_read_lets_no_namespace_in() {
        let with = |allowed: Value| read(&json!({ "device": { "name": "a" }, "allowedNamespaces": allowed }));
        let labels = [("a".to_owned(), "b".to_owned())].into();
        let like = json!({ "matchExpressions": [{ "key": "a", "operator": "Like", "values": ["b"] }] });
        for (allowed, why) in [
            (
                json!({ "from": "Selector", "selector": like }),
                "spec.allowedNamespaces.selector: unknown variant `Like`, expected one of",
            ),
            (json!({ "from": "Selector" }), "spec.allowedNamespaces: use selector"),
            (json!({ "from": "All", "selector": {} }), "spec.allowedNamespaces: use selector"),
        ] {
            let target = with(allowed);
            assert!(!target.namespaces.matches(&labels));
            assert!(target.destination.clone().unwrap_err().starts_with(why), "{target:?}");
        }
        let some = with(json!({ "from": "Selector", "selector": { "matchLabels": { "a": "b" } } }));
        assert!(some.namespaces.matches(&labels) && !some.namespaces.matches(&Default::default()));
    }

    proptest! {
        /// The text of a field never becomes a separate option of the tunnel: a target has the values of the fields, or
        /// is refused.
        #[test]
        fn a_field_is_one_option(remote in "\\PC{0,20}", device in "\\PC{0,16}") {
            let spec = json!({ "vxlan": { "remoteIP": remote, "destinationPort": 14789, "vni": 7, "device": device } });
            if let Ok(destination) = read(&spec).destination {
                let tunnel = destination.tunnel().unwrap();
                prop_assert_eq!(Ok(tunnel.remote), remote.parse::<IpAddr>());
                prop_assert_eq!(tunnel.existing.as_deref(), Some(device.as_str()));
                prop_assert_eq!(tunnel.oversize, mirror_core::tunnel::Oversize::Segment);
            }
        }
    }
}
