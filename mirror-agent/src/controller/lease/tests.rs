//! Tests: the holder of the Lease after a controller ends, disappears or is slow.

#![expect(clippy::unwrap_used, reason = "tests panic")]

use std::sync::{Arc, Mutex};

use serde_json::{Value, json};

use super::*;
use crate::sources::kube::tests::fake::{self, Reply};

const DURATION: Duration = Duration::from_secs(30);

/// A server with the object, which can stop to answer.
#[derive(Default)]
struct World {
    object: Option<Value>,
    version: u64,
    is_away: bool,
}

#[derive(Clone, Default)]
struct Server(Arc<Mutex<World>>);

impl Server {
    fn lease(&self, holder: &str) -> Lease {
        let world = Arc::clone(&self.0);
        let client = fake::client_with_bodies(move |request, body| {
            let mut world = world.lock().unwrap();
            if world.is_away {
                return Reply::Never;
            }
            let version = world.version.to_string();
            match (request.method().as_str(), &world.object) {
                ("GET", Some(object)) => return Reply::Object(object.clone()),
                ("GET", None) => return Reply::Status(404),
                ("POST", Some(_)) => return Reply::Status(409),
                ("PUT", _) if body["metadata"]["resourceVersion"] != json!(version) => {
                    return Reply::Status(409);
                }
                _ => {}
            }
            world.version += 1;
            let mut object = body.clone();
            object["metadata"]["resourceVersion"] = json!(world.version.to_string());
            world.object = Some(object.clone());
            Reply::Object(object)
        });
        let (namespace, lease, holder) = ("podmirror".into(), "lease".into(), holder.into());
        Lease::new(client, Identity { namespace, lease, holder, duration: DURATION }, Health::default())
    }

    fn holder(&self) -> Value {
        let world = self.0.lock().unwrap();
        world.object.as_ref().map_or(Value::Null, |object| object["spec"]["holderIdentity"].clone())
    }

    fn set_away(&self, is_away: bool) {
        self.0.lock().unwrap().is_away = is_away;
    }
}

#[tokio::test(start_paused = true)]
async fn one_of_two_holds_it_until_it_gives_it_back() {
    let server = Server::default();
    let (mut one, mut two) = (server.lease("one"), server.lease("two"));
    one.acquire().await;
    assert_eq!((server.holder(), one.health.ready()), (json!("one"), Ok(())));
    // It is renewed forever, and the other replica waits forever.
    let both = async { tokio::join!(one.hold(), two.acquire()) };
    assert!(timeout(Duration::from_secs(3600), both).await.is_err());
    assert_eq!((server.holder(), two.health.ready()), (json!("one"), Ok(())));
    one.release().await;
    assert_eq!(server.holder(), Value::Null);
    let begun = Instant::now();
    two.acquire().await;
    assert_eq!(server.holder(), json!("two"));
    assert!(begun.elapsed() < DURATION / 3);
    let transitions = server.0.lock().unwrap().object.as_ref().unwrap()["spec"]["leaseTransitions"].clone();
    assert_eq!(transitions, 1);
}

#[tokio::test(start_paused = true)]
async fn who_vanishes_is_followed_by_the_other_one() {
    let server = Server::default();
    let (mut one, mut two) = (server.lease("one"), server.lease("two"));
    one.acquire().await;
    let begun = Instant::now();
    two.acquire().await;
    let waited = begun.elapsed();
    assert!(waited > DURATION && waited < 2 * DURATION, "{waited:?}");
    assert_eq!(server.holder(), json!("two"));
    // The first one was only slow, and notices the loss.
    timeout(DURATION, one.hold()).await.unwrap();
    assert_eq!(server.holder(), json!("two"));
}

#[tokio::test(start_paused = true)]
async fn who_cannot_renew_it_gives_up_before_another_one_may_take_it() {
    let server = Server::default();
    let mut one = server.lease("one");
    one.acquire().await;
    server.set_away(true);
    let begun = Instant::now();
    one.hold().await;
    assert!(begun.elapsed() < DURATION, "{:?}", begun.elapsed());
    sleep(Duration::from_secs(61)).await;
    let reason = one.health.ready().unwrap_err();
    assert!(reason.starts_with("the API server has not answered for "), "{reason}");
    server.set_away(false);
    one.acquire().await;
    assert_eq!(one.health.ready(), Ok(()));
}
