//! [`with_failures`]: a client that reports its failed requests, so that they can be counted.

use http::{Request, StatusCode};
use kube::{Client, Error, client::Body};
use tower::service_fn;

/// Returns the client with a function that it calls for each failed request: with the status code of the answer, or
/// with `None` if there was no answer before the caller stopped waiting. Must be called in a tokio runtime.
#[must_use]
pub fn with_failures(client: Client, failed: impl Fn(Option<u16>) + Clone + Send + Sync + 'static) -> Client {
    let namespace = client.default_namespace().to_owned();
    let send = move |request: Request<Body>| {
        let (client, failed) = (client.clone(), failed.clone());
        async move {
            let mut sent = Sent { failed, status: None };
            let answer = client.send(request).await?;
            sent.status = Some(answer.status());
            Ok::<_, Error>(answer)
        }
    };
    Client::new(service_fn(send), namespace)
}

/// A request. When it is dropped, it has failed unless its answer says otherwise.
struct Sent<F: Fn(Option<u16>)> {
    failed: F,
    status: Option<StatusCode>,
}

impl<F: Fn(Option<u16>)> Drop for Sent<F> {
    fn drop(&mut self) {
        if self.status.is_none_or(|status| status.is_client_error() || status.is_server_error()) {
            (self.failed)(self.status.map(|status| status.as_u16()));
        }
    }
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "tests")]

    use std::{
        future::pending,
        sync::{Arc, Mutex},
    };

    use http::Response;
    use tokio::sync::Notify;
    use tower::BoxError;

    use super::*;

    #[tokio::test]
    async fn a_request_fails_by_an_error_or_without_an_answer() {
        let hangs = Arc::new(Notify::new());
        let has_come = Arc::clone(&hangs);
        let server = service_fn(move |request: Request<Body>| {
            let has_come = Arc::clone(&has_come);
            let path = request.uri().path().trim_start_matches('/').to_owned();
            async move {
                match path.as_str() {
                    "breaks" => Err(BoxError::from("the connection is broken")),
                    "hangs" => {
                        has_come.notify_one();
                        pending().await
                    }
                    code => {
                        let code: u16 = code.parse()?;
                        Ok(Response::builder().status(code).body(Body::empty())?)
                    }
                }
            }
        });
        let failures = Arc::new(Mutex::new(Vec::new()));
        let seen = Arc::clone(&failures);
        let failed = move |code| seen.lock().unwrap().push(code);
        let client = with_failures(Client::new(server, "shop"), failed);
        assert_eq!(client.default_namespace(), "shop");

        let request = |path: &str| Request::get(path).body(Body::empty()).unwrap();
        for code in [200, 403, 503] {
            let answer = client.send(request(&format!("/{code}"))).await.unwrap();
            assert_eq!(answer.status(), code, "the answer reaches the caller");
        }
        let error = client.send(request("/breaks")).await.unwrap_err();
        assert_eq!(crate::in_words(&error), "the connection is broken");
        let is_answered = tokio::select! {
            _ = client.send(request("/hangs")) => true,
            () = hangs.notified() => false,
        };
        assert!(!is_answered);
        assert_eq!(*failures.lock().unwrap(), [Some(403), Some(503), None, None]);
    }
}
