//! What is read in URIs, and what is refused.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod authorised;
mod model;

use super::*;

/// Reads a request, by its path below the version.
fn read(request: &str) -> Result<Query, Refusal> {
    parse(&Method::GET, &format!("/apis/{GROUP}/{VERSION}{request}").parse().unwrap())
}

/// The settings with this filter and snap length.
fn settings(filter: &str, snap_length: i32) -> SettingsSpec {
    SettingsSpec {
        filter: Some(filter.to_owned()),
        snap_length: Some(snap_length),
        ..SettingsSpec::default()
    }
}

#[test]
fn a_request_for_packets_is_read_whole() {
    let request = "/namespaces/shop/packets?watch=true&fieldSelector=metadata.name%3Dweb-1&labelSelector=app%3Dweb\
                   &filter=tcp+port%20443&snapLength=96&direction=Ingress&superFrames=true&nics=eth0,net1&since=1500ms\
                   &follow=false&timeoutSeconds=60&timeout=30s";
    let [namespace, name] = ["shop", "web-1"].map(|text| Some(text.to_owned()));
    let scope = Scope { verb: "watch", resource: "packets", namespace, name };
    let labels = labels::parse("app=web").unwrap();
    let nics = Some(vec!["eth0".to_owned(), "net1".to_owned()]);
    let read_of = ReadRequest {
        of: ReadOf::Pods { namespace: scope.namespace.clone(), name: scope.name.clone(), labels, nics },
        direction: Some(Direction::Ingress),
        settings: settings("tcp port 443", 96),
        super_frames: true,
        since_seconds: Some(2),
        follow: false,
        reader: String::new(),
    };
    let lasts = Some(Duration::from_secs(60));
    let packets = Packets { scope, read: read_of.clone(), node: None, lasts };
    assert_eq!(read(request), Ok(Query::Packets(Box::new(packets))));

    let name = Some("node-1".to_owned());
    let scope = Scope { verb: "watch", resource: "nodepackets", namespace: None, name: name.clone() };
    let read_of = ReadRequest {
        of: ReadOf::Interface("eth0".to_owned()),
        direction: None,
        settings: SettingsSpec::default(),
        super_frames: false,
        since_seconds: None,
        follow: true,
        ..read_of
    };
    let packets = Packets { scope, read: read_of, node: name, lasts: None };
    let request = "/nodepackets?interface=eth0&watch=true&fieldSelector=metadata.name=node-1";
    assert_eq!(read(request), Ok(Query::Packets(Box::new(packets))));
}

#[test]
fn reports_and_open_documents_are_read() {
    let scope = |verb, namespace: Option<&str>, name: Option<&str>| {
        let [namespace, name] = [namespace, name].map(|text| text.map(str::to_owned));
        Scope { verb, resource: "podreports", namespace, name }
    };
    for (request, scope, interval) in [
        ("/podreports?limit=500&resourceVersion=0", scope("list", None, None), None),
        ("/podreports?fieldSelector=metadata.name=a.b", scope("list", None, Some("a.b")), None),
        ("/namespaces/shop/podreports?interval=2s", scope("list", Some("shop"), None), Some(2)),
        ("/namespaces/shop/podreports/web-1", scope("get", Some("shop"), Some("web-1")), None),
    ] {
        let interval = interval.map(Duration::from_secs);
        let reports = Reports { scope, labels: LabelSelector::default(), interval };
        assert_eq!(read(request), Ok(Query::Reports(reports)), "{request}");
    }
    for (path, open) in [
        ("/apis", Open::Groups),
        ("/apis/packets.podmirror.io?timeout=32s", Open::Versions),
        ("/apis/packets.podmirror.io/v1alpha1", Open::Resources),
    ] {
        assert_eq!(parse(&Method::GET, &path.parse().unwrap()), Ok(Query::Open(open)), "{path}");
    }
}

#[test]
fn a_wrong_parameter_is_named() {
    let long = format!("/packets?watch=true&filter={}", "%C3%A9".repeat(1000));
    for (request, reason, field, message) in [
        ("/packets", "Required", "watch", "watch \"\": use true"),
        ("/packets?watch=TRUE", "Invalid", "watch", "watch \"TRUE\": use true"),
        ("/packets?watch=true&watch=true", "Duplicate", "watch", "watch \"true\": the parameter is repeated"),
        (
            "/packets?watch=true&Filter=tcp",
            "NotSupported",
            "Filter",
            "the parameters are watch fieldSelector",
        ),
        ("/packets?watch=true&", "NotSupported", "", "the parameters are"),
        ("/packets?watch=true&interface=eth0", "NotSupported", "interface", "the parameters are"),
        (
            "/packets?watch=true&filter=%zz",
            "Invalid",
            "filter",
            "filter \"%zz\": use 1 to 8192 bytes of UTF-8",
        ),
        ("/packets?watch=true&filter=%FF", "Invalid", "filter", "filter \"%FF\": use"),
        ("/packets?watch=true&filter=%00", "Invalid", "filter", "filter \"%00\": use"),
        ("/packets?watch=true&filter=tcp;", "Invalid", "filter", "filter \"tcp;\": use"),
        ("/packets?watch=true&filter=tcp+prot+80", "Invalid", "filter", "\"prot\" at byte 4 of the filter"),
        (long.as_str(), "Invalid", "filter", "at most 1024 bytes"),
        ("/packets?watch=true&snapLength=9", "Invalid", "snapLength", "snapLength \"9\": use a number"),
        ("/packets?watch=true&direction=in", "Invalid", "direction", "use Both or Ingress or Egress"),
        ("/packets?watch=true&superFrames=1", "Invalid", "superFrames", "superFrames \"1\": use true"),
        ("/packets?watch=true&nics=eth0,", "Invalid", "nics", "nics \"eth0,\": an interface name"),
        ("/packets?watch=true&since=25h", "Invalid", "since", "since \"25h\": use a time from 1s to 24h"),
        ("/packets?watch=true&since=soon", "Invalid", "since", "since \"soon\": use a time as in"),
        ("/packets?watch=true&follow=false", "Invalid", "follow", "use it together with since"),
        ("/packets?watch=true&timeoutSeconds=abc", "Invalid", "timeoutSeconds", "use a whole number"),
        (
            "/packets?watch=true&timeoutSeconds=060",
            "Invalid",
            "timeoutSeconds",
            "timeoutSeconds \"060\": use",
        ),
        (
            "/packets?watch=true&timeoutSeconds=+60",
            "Invalid",
            "timeoutSeconds",
            "timeoutSeconds \" 60\": use",
        ),
        ("/packets?watch=true&labelSelector=app%3Dwe$b", "Invalid", "labelSelector", "is not a selector"),
        ("/packets?watch=true&fieldSelector=a=b", "Invalid", "fieldSelector", "use metadata.name=NAME"),
        ("/nodepackets?watch=true", "Required", "fieldSelector", "use metadata.name=NAME"),
        (
            "/nodepackets?watch=true&fieldSelector=metadata.name=a",
            "Required",
            "interface",
            "an interface name",
        ),
        ("/nodepackets?watch=true&labelSelector=app", "NotSupported", "labelSelector", "the parameters are"),
        ("/podreports?interval=6s", "Invalid", "interval", "interval \"6s\": use a time from 1s to 5s"),
        ("/podreports?limit=many", "Invalid", "limit", "limit \"many\": use a whole number"),
        ("/podreports?filter=tcp", "NotSupported", "filter", "the parameters are"),
        (
            "/namespaces/shop/podreports/web-1?fieldSelector=a",
            "NotSupported",
            "fieldSelector",
            "the parameters",
        ),
        ("?labelSelector=app", "NotSupported", "labelSelector", "the parameters are timeout"),
    ] {
        let Refusal { code, reason: word, message: whole, causes, retry } = read(request).unwrap_err();
        assert_eq!((code, word, retry), (400, "BadRequest", None), "{request}");
        assert!(whole.contains(message), "{request}: {whole}");
        assert!(whole.len() < 1000, "{whole}");
        let reason = format!("FieldValue{reason}");
        let causes: Vec<_> = causes
            .iter()
            .map(|cause| (&*cause.reason, cause.field.as_str(), cause.message.as_str()))
            .collect();
        assert_eq!(causes, [(reason.as_str(), field, whole.as_str())], "{request}");
    }
}

#[test]
fn another_path_and_another_method_are_refused() {
    for path in [
        "/",
        "*",
        "/metrics",
        "/apis/",
        "/apis/podmirror.io",
        "/apis/packets.podmirror.io/v1/packets?watch=true",
    ] {
        let refusal = parse(&Method::GET, &path.parse().unwrap()).unwrap_err();
        assert_eq!((refusal.code, refusal.reason), (404, "NotFound"), "{path}");
    }
    let uri: Uri = format!("/apis/{GROUP}/{VERSION}/podreports").parse().unwrap();
    for method in [Method::HEAD, Method::POST, Method::DELETE] {
        let refusal = parse(&method, &uri).unwrap_err();
        assert_eq!((refusal.code, refusal.reason), (405, "MethodNotAllowed"), "{method}");
    }
    assert_eq!(read("/podreports?watch=true").unwrap_err().code, 405);
}
