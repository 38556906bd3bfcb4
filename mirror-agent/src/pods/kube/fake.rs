//! An API server of canned answers, for tests. It has no connection: so time can stand still.

#![expect(clippy::unwrap_used, reason = "tests panic")]

use std::{convert::Infallible, future::pending, sync::Arc};

use http::{Request, Response};
use kube::{Client, client::Body};
use serde_json::{Value, json};
use tower::service_fn;

/// What it says to a request.
#[derive(Debug, Clone)]
pub(super) enum Reply {
    /// 200, with an object.
    Object(Value),
    /// An error by its code.
    Status(u16),
    /// Nothing, for ever.
    Never,
}

/// A client of a server that gives these answers. Must be called in a tokio runtime.
pub(super) fn client(answer: impl Fn(&Request<Body>) -> Reply + Send + Sync + 'static) -> Client {
    let answer = Arc::new(answer);
    let service = service_fn(move |request: Request<Body>| {
        let reply = answer(&request);
        async move { Ok::<_, Infallible>(response(reply).await) }
    });
    Client::new(service, "default")
}

async fn response(reply: Reply) -> Response<Body> {
    let (code, text) = match reply {
        Reply::Object(object) => (200, object.to_string()),
        Reply::Status(code) => {
            let reason = if code == 404 { "NotFound" } else { "" };
            (code, json!({"kind": "Status", "message": "no", "reason": reason, "code": code}).to_string())
        }
        Reply::Never => pending().await,
    };
    Response::builder().status(code).body(Body::from(text.into_bytes())).unwrap()
}
