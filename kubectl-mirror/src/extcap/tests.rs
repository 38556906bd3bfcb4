//! Tests of each question by Wireshark: the exact answer, and the command line for a capture.

#![expect(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

use std::{convert::Infallible, path::Path, time::Duration};

use http::{Request, Response};
use kube::{Client, client::Body};
use mirror_api::labels;
use serde_json::json;
use tower::service_fn;

use super::*;

/// A context whose name is that of a cluster of EKS.
const EKS: &str = "arn:aws:eks:eu-west-1:1:cluster/b";

fn call(words: &[&str]) -> Call {
    Call::parse(words.iter().map(|word| (*word).to_owned()))
}

fn answer(words: &[&str]) -> Result<String, String> {
    let contexts = json!([
        { "name": "kind-a", "context": { "cluster": "a", "namespace": "shop" } },
        { "name": EKS, "context": { "cluster": "b" } },
    ]);
    let kubeconfig = Kubeconfig::from_yaml(&json!({ "contexts": contexts }).to_string()).unwrap();
    call(words).answer(&kubeconfig).map_err(|error| error.to_string())
}

/// A cluster of a user who lacks the right to list the objects at this path.
fn cluster(forbidden: &'static str) -> Cluster {
    let service = service_fn(move |request: Request<Body>| async move {
        let path = request.uri().path();
        let names: &[&str] = match path {
            "/api/v1/namespaces" => &["default", "shop"],
            "/apis/apps/v1/namespaces/shop/deployments" => &["web"],
            "/api/v1/namespaces/shop/pods" => &["web-0", "web-1"],
            _ => &[],
        };
        let items: Vec<_> = names.iter().map(|name| json!({ "metadata": { "name": name } })).collect();
        let list = json!({ "apiVersion": "v1", "kind": "List", "metadata": {}, "items": items });
        let refusal = json!({ "status": "Failure", "reason": "Forbidden", "code": 403, "message": "no" });
        let (code, body) = if path == forbidden { (403_u16, refusal) } else { (200, list) };
        let body = Body::from(body.to_string().into_bytes());
        Ok::<_, Infallible>(Response::builder().status(code).body(body).unwrap())
    });
    let client = Client::new(service, "shop");
    Cluster { client, namespace: "shop".to_owned(), agents: "podmirror".to_owned() }
}

#[test]
fn the_contexts_are_interfaces() {
    for (version, prefix) in [
        ("4.2", "podmirror:"),
        ("4.10", "podmirror:"),
        ("5.0", "podmirror:"),
        ("4.0", "podmirror/"),
        ("3.6", "podmirror/"),
        ("", "podmirror/"),
    ] {
        let version = format!("--extcap-version={version}");
        let expected = format!(
            "extcap {{version={}}}{{display=podmirror}}\n\
             interface {{value={prefix}kind-a}}{{display=Kubernetes: kind-a}}\n\
             interface {{value={prefix}{EKS}}}{{display=Kubernetes: {EKS}}}\n",
            env!("CARGO_PKG_VERSION")
        );
        assert_eq!(answer(&["--extcap-interfaces", &version]), Ok(expected));
    }
}

#[test]
fn an_interface_has_a_link_type_and_options() {
    let dlts = "dlt {number=1}{name=EN10MB}{display=Ethernet}\n";
    let interface = format!("podmirror:{EKS}");
    assert_eq!(answer(&["--extcap-dlts", "--extcap-interface", &interface]), Ok(dlts.to_owned()));
    let options = |kind: &str, namespace: &str| {
        format!(
            "arg {{number=0}}{{call=--namespace}}{{display=Namespace}}{kind}{{default={namespace}}}\n\
             arg {{number=1}}{{call=--workload}}{{display=Workload}}{kind}{{required=true}}\
             {{tooltip=deploy/web, web-0 (a pod), app=web (labels) or * (all pods)}}\n\
             value {{arg=0}}{{value={namespace}}}{{display={namespace}}}\n\
             value {{arg=1}}{{value=*}}{{display=*}}\n"
        )
    };
    for (interface, kind, namespace) in [
        ("podmirror:kind-a", "{type=editselector}{reload=true}", "shop"),
        ("podmirror/kind-a", "{type=string}", "shop"),
        ("podmirror:arn:aws:eks:eu-west-1:1:cluster/b", "{type=editselector}{reload=true}", "default"),
    ] {
        let config = answer(&["--extcap-config", "--extcap-interface", interface]);
        assert_eq!(config, Ok(options(kind, namespace)));
    }
    assert_eq!(
        answer(&["--extcap-config", "--extcap-interface", "eth0"]),
        Err("no interface \"eth0\"".to_owned())
    );
    // A question of a later version.
    assert_eq!(answer(&["--extcap-later", "--extcap-interface", "podmirror:kind-a"]), Ok(String::new()));
}

#[test]
fn a_mistake_in_a_filter_is_one_line() {
    let check = |filter: &str| {
        answer(&["--extcap-capture-filter", filter, "--extcap-interface", "podmirror:kind-a"]).unwrap()
    };
    assert_eq!(check("tcp port 443"), "");
    assert_eq!(check(""), "");
    let mistake = check("tcp prot 443");
    assert_eq!(mistake, parse_filter("tcp prot 443").unwrap_err() + "\n");
    assert_eq!(mistake.lines().count(), 1, "{mistake}");
}

#[tokio::test]
async fn a_reload_lists_what_the_user_can_read() {
    let no_jobs = cluster("/apis/batch/v1/namespaces/shop/jobs");
    assert_eq!(
        values("namespace", &no_jobs).await.unwrap(),
        "value {arg=0}{value=default}{display=default}\nvalue {arg=0}{value=shop}{display=shop}\n"
    );
    assert_eq!(
        values("workload", &no_jobs).await.unwrap(),
        "value {arg=1}{value=*}{display=*}\n\
         value {arg=1}{value=deploy/web}{display=deploy/web}\n\
         value {arg=1}{value=pod/web-0}{display=pod/web-0}\n\
         value {arg=1}{value=pod/web-1}{display=pod/web-1}\n"
    );
    assert!(lacks_right(&values("namespace", &cluster("/api/v1/namespaces")).await.unwrap_err()));
}

#[test]
fn a_capture_is_a_tail() {
    let tail = |options: &[&str]| {
        let words = ["--capture", "--extcap-interface", "podmirror/kind-a", "--fifo", "/tmp/fifo"];
        call(&[&words[..], options].concat()).tail("/tmp/fifo").map_err(|error| error.to_string())
    };
    for (workload, objects, labels) in [
        ("deploy/web", &["deploy/web"][..], None),
        ("pod web-0 web-1 ", &["pod", "web-0", "web-1"], None),
        ("*", &[], Some("")),
        ("app=web,tier in (a, b)", &[], Some("app=web,tier in (a, b)")),
        ("!test", &[], Some("!test")),
    ] {
        let filter = ["--extcap-capture-filter", "tcp port 80"];
        let cli = tail(&[&["--namespace", "shop", "--workload", workload], &filter[..]].concat());
        let Ok(Cli { command: Command::Tail(args), connection }) = cli else { panic!("{workload}") };
        assert_eq!(args.which.objects, objects, "{workload}");
        assert_eq!(args.which.selector, labels.map(|text| labels::parse(text).unwrap()), "{workload}");
        assert_eq!(args.settings().unwrap().filter.as_deref(), Some("tcp port 80"));
        assert_eq!((&*args.write, args.duration), (Path::new("/tmp/fifo"), Duration::from_secs(86_400)));
        assert_eq!(connection.context.as_deref(), Some("kind-a"));
        assert_eq!(connection.namespace.as_deref(), Some("shop"));
    }
    // The default namespace is that of the context.
    let Ok(Cli { connection, .. }) = tail(&["--workload", "web"]) else { panic!("no command") };
    assert_eq!(connection.namespace, None);
    assert!(tail(&[]).is_err_and(|why| why.starts_with("choose a workload")));
}
