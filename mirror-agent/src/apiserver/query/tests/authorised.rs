//! What is served was authorised: the reader of URIs beside a model of kube-apiserver.

use std::cell::Cell;

use proptest::{
    collection::vec,
    prelude::*,
    sample::{Index, select},
    test_runner::{Config, TestRunner},
};

use super::{
    model::{Info, check},
    *,
};

/// What the server serves for a URI.
fn serve(uri: &str) -> Option<Info> {
    let uri: Uri = uri.parse().ok()?;
    let scope = match parse(&Method::GET, &uri).ok()? {
        Query::Packets(packets) => packets.scope,
        Query::Reports(reports) => reports.scope,
        Query::Open(_) => return Some(Err(uri.path().to_owned())),
    };
    let [verb, resource, namespace, name] = scope.attributes();
    Some(Ok([verb, GROUP, VERSION, namespace, resource, "", name].map(str::to_owned)))
}

/// Requests, below the version.
const REQUESTS: &[&str] = &[
    "/packets?watch=true",
    "/packets?watch=true&fieldSelector=metadata.name%3Dweb-1&labelSelector=app",
    "/namespaces/shop/packets?watch=true&fieldSelector=metadata.name=web-1",
    "/namespaces/shop/packets?watch=true&fieldSelector=metadata.name=web-1&timeoutSeconds=60",
    "/namespaces/shop/packets?watch=true&labelSelector=app+in+(web,%20api),!test",
    "/nodepackets?watch=true&fieldSelector=metadata.name=node-1&interface=eth0",
    "/podreports?limit=500&fieldSelector=metadata.name=web-1",
    "/namespaces/shop/podreports",
    "/namespaces/shop/podreports/web-1?timeout=32s",
    "?timeout=32s",
];

/// Parameters: those that both servers know, those that one of them knows, and values that one of them refuses.
const PARAMETERS: &[&str] = &[
    "watch=true",
    "watch=TRUE",
    "watch=1",
    "watch=false",
    "watch",
    "w%61tch=true",
    "fieldSelector=metadata.name=db-1",
    "fieldSelector=metadata.name==db-1",
    "fieldSelector=metadata.name%21=db-1",
    "fieldSelector=metadata.name%3Ddb%5C%2C1",
    "fieldSelector=metadata.name=db-1,metadata.name=web-1",
    "fieldSelector=metadata.namespace=shop",
    "fieldSelector=metadata.name=..",
    "fieldSelector=",
    "labelSelector=app%3Dweb",
    "labelSelector=app!%3Dweb,tier",
    "labelSelector=app+notin+()",
    "labelSelector=in+in+(in)",
    "labelSelector=app=we$b",
    "labelSelector=app=web%C2%A0",
    "labelSelector=a.io/b/app",
    "labelSelector=A.io/app",
    "labelSelector=app%3E5",
    "labelSelector=app,",
    "timeoutSeconds=60",
    "timeoutSeconds=abc",
    "timeoutSeconds=99999999999999999999",
    "limit=500",
    "limit=many",
    "filter=tcp+port+80",
    "nics=eth0,net1",
    "interface=eth0",
    "since=5m",
    "follow=false",
    "snapLength=96",
    "direction=Ingress",
    "superFrames=true",
    "interval=2s",
    "resourceVersion=0",
    "resourceVersionMatch=Exact",
    "includeObject=Object",
    "timeout=32s",
    "continue=x",
    "sendInitialEvents=true",
    "%66ieldSelector=metadata.name%3Ddb-1",
];

/// What an edit inserts into a URI.
const EDITS: &[&str] = &[
    "/",
    "/watch",
    "/proxy",
    "/status",
    "/namespaces/db",
    "%2F",
    "%77",
    "..",
    "%",
    "%0",
    "%zz",
    "%00",
    "%FF",
    "é",
    ";",
    "&",
    "&&",
    "=",
    "+",
    ",",
    "!",
    "\\",
    "%5C",
    "?",
    "#",
    ".",
    "-",
    "A",
    "_",
    "%26",
    "%3D",
    "%3B",
    "%09",
];

/// URIs that are requests, or nearly.
fn uris() -> impl Strategy<Value = String> {
    let edits = vec((any::<Index>(), select(EDITS)), 0..3);
    (select(REQUESTS), vec(select(PARAMETERS), 0..3), edits).prop_map(|(request, parameters, edits)| {
        let mut uri = format!("/apis/{GROUP}/{VERSION}{request}");
        for parameter in parameters {
            uri.push(if uri.contains('?') { '&' } else { '?' });
            uri.push_str(parameter);
        }
        for (at, edit) in edits {
            uri.insert_str(uri.floor_char_boundary(at.index(uri.len() + 1)), edit);
        }
        uri
    })
}

#[test]
fn what_is_served_was_authorised() {
    let served = Cell::new(0);
    let config = Config { cases: 4096, failure_persistence: None, ..Config::default() };
    let checked = TestRunner::new(config).run(&uris(), |uri| {
        served.set(served.get() + check(&uri, serve));
        Ok(())
    });
    checked.unwrap();
    // A ninth of the URIs has neither a further parameter nor an edit, and is checked twice.
    assert!(served.get() > 600, "only {} URIs were served", served.get());
}

/// kube-apiserver reads another request than the one that is written, or none.
#[test]
fn a_spelling_that_hides_a_request_is_refused() {
    for request in [
        "/packets?watch=true&fieldSelector=metadata.name=web-1&fieldSelector=metadata.name=db-1",
        "/packets?watch=true&fieldSelector=metadata.name==web-1",
        "/packets?watch=true&fieldSelector=metadata.name=web-1&timeoutSeconds=abc",
        "/packets?watch=true&fieldSelector=metadata.name=web-1&labelSelector=app=we$b",
        "/packets?fieldSelector=metadata.name=web-1&watch=true;",
        "/packets?watch=TRUE",
        "/packets?watch=true&watch=false",
        "/packets/?watch=true",
        "//packets?watch=true",
        "/watch/packets",
        "/namespaces/shop%2Fpackets?watch=true",
        "/namespaces/shop/packets/web-1?watch=true",
        "/namespaces/../packets?watch=true",
        "/namespaces//packets?watch=true",
        "/namespaces/shop/nodepackets?watch=true&fieldSelector=metadata.name=node-1&interface=eth0",
        "/podreports/web-1",
    ] {
        assert_eq!(serve(&format!("/apis/{GROUP}/{VERSION}{request}")), None, "{request}");
    }
}

#[test]
fn the_model_reads_uris_as_kube_apiserver_does() {
    for (uri, info) in [
        ("/api/v1/pods", "list||v1||pods||"),
        ("/api/v1/namespaces/shop/finalize", "get||v1|shop|namespaces|finalize|shop"),
        ("/api/v1/watch/namespaces/shop/pods", "watch||v1|shop|pods||"),
        ("/api/v1/%77atch/pods/web/", "watch||v1||pods||web"),
        (
            "/apis/apps/v1/namespaces/shop/deployments/web/scale?watch=true",
            "get|apps|v1|shop|deployments|scale|web",
        ),
        ("/apis/a.io/v1//things", "get|a.io|v1||||things"),
        ("/apis/a.io/v1/things?watch", "watch|a.io|v1||things||"),
        ("/apis/a.io/v1/things?watch=False", "list|a.io|v1||things||"),
        ("/apis/a.io/v1/things?watch=true;&fieldSelector=metadata.name%3Dx", "list|a.io|v1||things||x"),
        ("/apis/a.io/v1/things?fieldSelector=a%3Db,metadata.name==x", "list|a.io|v1||things||x"),
        (
            "/apis/a.io/v1/things?fieldSelector=metadata.name=x&fieldSelector=metadata.name=y",
            "list|a.io|v1||things||x",
        ),
        ("/apis/a.io/v1/things?fieldSelector=metadata.name!=x", "list|a.io|v1||things||"),
        ("/apis/a.io/v1/things?fieldSelector=metadata.name=x,y", "list|a.io|v1||things||"),
        ("/apis/a.io/v1/things?fieldSelector=metadata.name=x%2Fy", "list|a.io|v1||things||"),
        (
            "/apis/a.io/v1/things?watch=yes&fieldSelector=metadata.name=x&limit=many",
            "watch|a.io|v1||things||",
        ),
        ("/apis/a.io/v1/things?labelSelector=a$b&fieldSelector=metadata.name=x", "list|a.io|v1||things||"),
        (
            "/apis/a.io/v1/things?labelSelector=!a,b+in+(,c),d%3E5&fieldSelector=metadata.name=x",
            "list|a.io|v1||things||x",
        ),
    ] {
        let info: Vec<_> = info.split('|').map(str::to_owned).collect();
        let info = Info::Ok(info.try_into().unwrap());
        assert_eq!(check(uri, |_| Some(info.clone())), 2, "{uri}");
    }
    for path in ["/", "/healthz", "/api/v1", "/apis/a.io/v1/", "/other/a.io/v1/things"] {
        assert_eq!(check(path, |_| Some(Err(path.to_owned()))), 2, "{path}");
    }
    assert_eq!(check("/apis/%zz", |_| unreachable!("kube-apiserver refuses it")), 0);
}
