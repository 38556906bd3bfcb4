//! An API server with canned responses, for tests. It has no connection, so that time can be paused.

#![expect(clippy::unwrap_used, reason = "tests panic")]

use std::{
    convert::Infallible,
    future::{pending, ready},
    sync::Arc,
    time::Duration,
};

use futures_util::{StreamExt as _, stream};
use http::{Request, Response};
use http_body_util::{BodyExt as _, Full, StreamBody, combinators::UnsyncBoxBody};
use hyper::body::{Bytes, Frame};
use kube::{Client, client::Body};
use serde_json::{Value, json};
use tokio::time::sleep;
use tower::service_fn;

type Answer = UnsyncBoxBody<Bytes, Infallible>;

/// A response.
#[derive(Debug, Clone)]
pub(crate) enum Reply {
    /// 200, with an object.
    Object(Value),
    /// 200, with these lines of a watch, which ends after this time.
    Watch(Vec<Value>, Duration),
    /// An error by its code.
    Status(u16),
    /// An error by its code and message.
    Error(u16, &'static str),
    /// No response, ever.
    Never,
}

/// Returns a client of a server that gives these responses. Must be called in a tokio runtime.
pub(crate) fn client(answer: impl Fn(&Request<Body>) -> Reply + Send + Sync + 'static) -> Client {
    let answer = Arc::new(answer);
    let service = service_fn(move |request: Request<Body>| {
        let reply = answer(&request);
        async move { Ok::<_, Infallible>(response(reply).await) }
    });
    Client::new(service, "default")
}

/// Like [`client`]; `answer` also gets the request's body as JSON.
pub(crate) fn client_with_bodies(
    answer: impl Fn(&Request<()>, &Value) -> Reply + Send + Sync + 'static,
) -> Client {
    let answer = Arc::new(answer);
    let service = service_fn(move |request: Request<Body>| {
        let answer = Arc::clone(&answer);
        async move {
            let (head, body) = request.into_parts();
            let body = body.collect_bytes().await.unwrap();
            let body = serde_json::from_slice(&body).unwrap_or_default();
            Ok::<_, Infallible>(response(answer(&Request::from_parts(head, ()), &body)).await)
        }
    });
    Client::new(service, "default")
}

async fn response(reply: Reply) -> Response<Answer> {
    let status = |code, message| {
        let reason = if code == 404 { "NotFound" } else { "" };
        (code, json!({"kind": "Status", "message": message, "reason": reason, "code": code}).to_string())
    };
    let (code, text) = match reply {
        Reply::Watch(lines, lasts) => {
            let lines = lines.iter().map(|line| format!("{line}\n")).collect();
            return Response::new(lasting(lines, lasts));
        }
        Reply::Object(object) => (200, object.to_string()),
        Reply::Status(code) => status(code, "no"),
        Reply::Error(code, message) => status(code, message),
        Reply::Never => pending().await,
    };
    Response::builder().status(code).body(Full::from(text.into_bytes()).boxed_unsync()).unwrap()
}

/// A body that ends after this time.
fn lasting(text: String, lasts: Duration) -> Answer {
    let text = stream::iter([Ok::<_, Infallible>(Frame::data(Bytes::from(text)))]);
    let end = stream::once(sleep(lasts)).filter_map(|()| ready(None));
    StreamBody::new(text.chain(end)).boxed_unsync()
}
