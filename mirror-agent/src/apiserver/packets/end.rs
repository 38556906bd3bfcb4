//! Why a request for packets ends before its packets do.

use std::{sync::Arc, time::Duration};

use mirror_core::settings::show_kubernetes_duration;
use tokio::time::{Instant, sleep};

use crate::apiserver::{
    Server,
    front_proxy::User,
    query::{Refusal, Scope},
};

/// Interval at which kube-apiserver authorises the request again, and the delay after a refusal. A
/// kube-apiserver that has just started refuses all requests until it knows the roles.
const RIGHTS: Duration = Duration::from_secs(60);
const REFUSED: Duration = Duration::from_secs(10);

/// Waits for a reason to end a request, which began before its answer.
pub(super) async fn end(
    server: Arc<Server>,
    user: User,
    scope: Scope,
    lasts: Option<Duration>,
    began: Instant,
) -> String {
    let revoked = revoked(|| server.front_proxy.authorise(&user, &scope));
    tokio::select! {
        why = expired(lasts, server.options.max_duration, began) => why,
        why = revoked => format!("a right was revoked: {why}"),
        () = server.stopped() => "the server ends".to_owned(),
    }
}

/// Waits for the end of the time of a request. The longest time counts from its begin, because the agents, which have the
/// same one, begin before the answer.
async fn expired(lasts: Option<Duration>, most: Duration, began: Instant) -> String {
    let left = most.saturating_sub(began.elapsed());
    if let Some(lasts) = lasts.filter(|lasts| *lasts <= left) {
        sleep(lasts).await;
        return "timeoutSeconds".to_owned();
    }
    sleep(left).await;
    format!("the longest duration of a request is {}", show_kubernetes_duration(most))
}

/// Waits until kube-apiserver refuses the access twice in succession. Returns its message.
async fn revoked<F: Future<Output = Result<(), Refusal>>>(authorise: impl Fn() -> F) -> String {
    let mut is_refused = false;
    loop {
        sleep(if is_refused { REFUSED } else { RIGHTS }).await;
        is_refused = match authorise().await {
            Err(Refusal { code: 403, message, .. }) if is_refused => break message,
            answer => answer.is_err_and(|refusal| refusal.code == 403),
        };
    }
}

#[cfg(test)]
mod tests {
    use std::{cell::RefCell, future::ready};

    use tokio::time::timeout;

    use super::*;

    /// The answer can come late.
    #[tokio::test(start_paused = true)]
    async fn a_request_ends_before_its_agents_do() {
        let seconds = Duration::from_secs;
        let longest = "the longest duration of a request is 1h";
        for (lasts, ends, expected) in
            [(Some(60), 72, "timeoutSeconds"), (Some(3600), 3600, longest), (None, 3600, longest)]
        {
            let began = Instant::now();
            sleep(seconds(12)).await;
            let why = expired(lasts.map(seconds), seconds(3600), began).await;
            assert_eq!((why.as_str(), began.elapsed().as_secs()), (expected, ends));
        }
    }

    /// kube-apiserver refuses requests for a moment after its start, and it can be away.
    #[tokio::test(start_paused = true)]
    async fn a_right_is_revoked_if_kube_apiserver_refuses_it_twice_in_succession() {
        let refused = |message: &str| Err(Refusal::new(403, "Forbidden", message));
        let away = || Err(Refusal::unavailable("no answer"));
        let answers = [Ok(()), refused("1"), Ok(()), refused("2"), away(), refused("3"), refused("4")];
        let (began, answers) = (Instant::now(), RefCell::new(answers.into_iter()));
        let times = RefCell::new(Vec::new());
        let message = revoked(|| {
            times.borrow_mut().push(began.elapsed().as_secs());
            ready(answers.borrow_mut().next().unwrap_or(Ok(())))
        });
        let message = timeout(Duration::from_secs(3600), message).await;
        assert_eq!(message.ok().as_deref(), Some("4"));
        assert_eq!(times.into_inner(), [60, 120, 130, 190, 200, 260, 270]);
    }
}
