//! The URIs of requests to the API of packets, and for any API the beginning of the answer to a request.

use std::iter;

use anyhow::Context as _;
use http::{Request, Response, header::WARNING};
use kube::{client::Body, core::Status};
use mirror_api::packets::{GROUP, VERSION};
use mirror_core::status::printable;
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};

use crate::cluster::Cluster;

/// The bytes that are encoded in a URI.
const SPECIAL: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'.').remove(b'_').remove(b'~');

/// The URI of a resource of a namespace, or of all (`None`), with parameters.
pub(crate) fn uri(namespace: Option<&str>, resource: &str, parameters: &[(&str, String)]) -> String {
    let mut uri = format!("/apis/{GROUP}/{VERSION}/");
    if let Some(namespace) = namespace {
        uri += &format!("namespaces/{}/", utf8_percent_encode(namespace, SPECIAL));
    }
    uri += resource;
    for ((key, value), separator) in parameters.iter().zip(iter::once('?').chain(iter::repeat('&'))) {
        uri += &format!("{separator}{key}={}", utf8_percent_encode(value, SPECIAL));
    }
    uri
}

/// Sends a request, and waits for the beginning of the answer.
///
/// # Errors
///
/// As of other requests to the API server, also if it does not reach the server of this API.
pub(crate) async fn get(cluster: &Cluster, uri: &str) -> anyhow::Result<Response<Body>> {
    let request = Request::get(uri).body(Body::empty()).context("cannot make the request")?;
    let response = cluster.client.send(request).await?;
    let code = response.status();
    if code.is_success() {
        return Ok(response);
    }
    let answer = response.into_body().collect_bytes().await?;
    // An answer in another form is that of kube-apiserver alone, or of a pod behind it.
    let status = serde_json::from_slice(&answer).unwrap_or_else(|_| {
        let reason = code.canonical_reason().unwrap_or_default().replace(' ', "");
        let text = String::from_utf8_lossy(&answer).trim().to_owned();
        let is_of_packets = uri.starts_with(&format!("/apis/{GROUP}/"));
        let message = match (is_of_packets, code.as_u16()) {
            (true, 404) => {
                "the cluster has no API of packets; the chart's apiserver.enabled installs it".to_owned()
            }
            (true, _) => format!("the API of packets: {text}"),
            (false, _) => text,
        };
        Status::failure(&message, &reason).with_code(code.as_u16())
    });
    Err(kube::Error::Api(status.boxed()).into())
}

/// The warnings of an answer, each as text for people.
pub(crate) fn warnings(response: &Response<Body>) -> Vec<String> {
    let warnings = response.headers().get_all(WARNING).iter().filter_map(|warning| warning.to_str().ok());
    // `299 - "TEXT"`, with backslashes before quotes.
    let texts = warnings.filter_map(|warning| warning.splitn(3, ' ').nth(2));
    texts.map(|text| printable(&text.trim_matches('"').replace("\\\"", "\"").replace("\\'", "'"))).collect()
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

    use percent_encoding::percent_decode_str;
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_warning_is_its_text() {
        let warning = r#"299 - "node b: no \"agent\" isn\'t \u{1b}""#;
        let response = Response::builder().header(WARNING, warning).header(WARNING, "299");
        let response = response.body(Body::empty()).unwrap();
        assert_eq!(warnings(&response), [r#"node b: no "agent" isn't \u{1b}"#]);
    }

    proptest! {
        /// The server refuses a raw semicolon, and a plus is a space there.
        #[test]
        fn a_value_reaches_the_server_as_it_is(values in prop::collection::vec(any::<String>(), 0..4), has_namespace: bool) {
            let parameters: Vec<_> = values.iter().map(|value| ("filter", value.clone())).collect();
            let uri = uri(has_namespace.then_some("shop"), "packets", &parameters);
            let (path, query) = uri.split_once('?').unwrap_or((&uri, ""));
            let within = if has_namespace { "namespaces/shop/" } else { "" };
            prop_assert_eq!(path, format!("/apis/packets.podmirror.io/v1alpha1/{within}packets"));
            prop_assert!(uri.parse::<http::Uri>().is_ok() && !query.contains([';', '+', ' ']), "{}", uri);
            let pairs = query.split('&').filter(|pair| !pair.is_empty());
            let raw = pairs.map(|pair| pair.strip_prefix("filter=").unwrap());
            let decoded = raw.map(|raw| percent_decode_str(raw).decode_utf8().unwrap());
            prop_assert_eq!(decoded.collect::<Vec<_>>(), values);
        }
    }
}
