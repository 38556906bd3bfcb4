//! URIs of requests to the API of packets: each is refused, or kube-apiserver has authorised what is served for it.

#![no_main]

#[path = "../../../mirror-agent/src/apiserver/query/tests/model.rs"]
mod model;

use libfuzzer_sys::fuzz_target;
use mirror_agent::apiserver::query::{Query, parse};
use mirror_api::packets::{GROUP, VERSION};

/// What the server serves for a URI.
fn serve(uri: &str) -> Option<model::Info> {
    let scope = match parse(&Default::default(), &uri.parse().ok()?).ok()? {
        Query::Packets(packets) => packets.scope,
        Query::Reports(reports) => reports.scope,
        Query::Open(_) => return Some(Err(uri.split('?').next()?.to_owned())),
    };
    let [verb, resource, namespace, name] = scope.attributes();
    Some(Ok([verb, GROUP, VERSION, namespace, resource, "", name].map(str::to_owned)))
}

fuzz_target!(|uri: &str| {
    model::check(uri, serve);
});
