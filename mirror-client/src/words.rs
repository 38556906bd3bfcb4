//! [`in_words`]: formats an error in one line for people. kube's own text of a rejection contains the whole answer in
//! Rust's debug format, and most texts repeat those of their causes.

use std::error::Error;

/// Returns the error with its causes, each one once. A rejection by the API server is the server's own message.
#[must_use]
pub fn in_words(error: &(dyn Error + 'static)) -> String {
    let mut words: Vec<String> = Vec::new();
    let mut next = Some(error);
    while let Some(error) = next {
        next = error.source();
        let own = match error.downcast_ref() {
            Some(kube::Error::Api(status)) => {
                next = None;
                if status.message.is_empty() { status.reason.clone() } else { status.message.clone() }
            }
            // Its text is that of its cause.
            Some(kube::Error::Service(_)) => String::new(),
            _ => {
                let text = error.to_string();
                let cause = next.map(ToString::to_string).unwrap_or_default();
                let own = text.strip_suffix(&cause).unwrap_or(&text);
                own.trim_end_matches([':', ' ']).to_owned()
            }
        };
        if !own.is_empty() && words.last() != Some(&own) {
            words.push(own);
        }
    }
    words.join(": ")
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "tests")]

    use anyhow::Context as _;
    use kube::core::Status;
    use serde_json::json;

    use super::*;

    #[test]
    fn a_refusal_is_the_servers_message_and_every_cause_is_said_once() {
        let refused = || {
            let status = json!({ "status": "Failure", "message": "pods is forbidden", "reason": "Forbidden", "code": 403 });
            kube::Error::Api(Box::new(serde_json::from_value::<Status>(status).unwrap()))
        };
        assert!(refused().to_string().contains("Status {"), "kube's text is better now: this module can go");
        assert_eq!(in_words(&refused()), "pods is forbidden");
        let with_context = Err::<(), _>(refused()).context("cannot list the pods").unwrap_err();
        assert_eq!(in_words(with_context.as_ref()), "cannot list the pods: pods is forbidden");
        let unreachable = kube::Error::Service("no route to host".into());
        assert_eq!(in_words(&unreachable), "no route to host");
        let plain = anyhow::anyhow!("nobody").context("nobody is there");
        assert_eq!(in_words(plain.as_ref()), "nobody is there: nobody");
    }
}
