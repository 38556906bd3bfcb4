//! [`redact`]: removes the values of an object that can be secret, and those that nobody reads. Pure.

use serde_json::Value;

/// The replacement for a value.
pub(super) const REDACTED: &str = "<redacted>";
/// Fields and annotations that are removed: the first one is long, the others contain the object as it was applied, by
/// kubectl, kapp and Rancher.
const REMOVED: [&str; 4] = [
    "managedFields",
    "kubectl.kubernetes.io/last-applied-configuration",
    "kapp.k14s.io/original",
    "objectset.rio.cattle.io/applied",
];
/// Lists of names with values: environment variables, and the headers of probes.
const LISTS: [&str; 2] = ["env", "httpHeaders"];

/// Redacts an object, and all objects in it, such as the items of a list and the template of a DaemonSet. References to
/// Secrets stay: they are names.
pub(super) fn redact(value: &mut Value) {
    match value {
        Value::Array(items) => items.iter_mut().for_each(redact),
        Value::Object(fields) => {
            fields.retain(|key, _| !REMOVED.contains(&key.as_str()));
            for list in LISTS {
                for entry in fields.get_mut(list).and_then(Value::as_array_mut).into_iter().flatten() {
                    if let Some(value) = entry.get_mut("value") {
                        *value = REDACTED.into();
                    }
                }
            }
            fields.values_mut().for_each(redact);
        }
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    /// A pod with the value in each place that can be secret, or without these places' contents.
    fn pod(variables: &[String], secret: Option<&str>) -> Value {
        let value = secret.unwrap_or(REDACTED);
        let mut env: Vec<_> = variables.iter().map(|name| json!({ "name": name, "value": value })).collect();
        let reference = json!({ "name": "db", "key": "password" });
        env.push(json!({ "name": "DB", "valueFrom": { "secretKeyRef": reference } }));
        let header = json!({ "name": "Authorization", "value": value });
        let container = json!({
            "name": "main", "env": env, "envFrom": [{ "secretRef": { "name": "all" } }],
            "readinessProbe": { "httpGet": { "path": "/readyz", "httpHeaders": [header] } },
        });
        let mut metadata = json!({ "name": "web", "annotations": { "podmirror.io/mirror": "true" } });
        if let Some(secret) = secret {
            metadata["managedFields"] = json!([{ "manager": secret }]);
            for key in &REMOVED[1..] {
                metadata["annotations"][key] = format!("{{\"env\":\"{secret}\"}}").into();
            }
        }
        json!({ "metadata": metadata, "spec": { "initContainers": [container], "containers": [container] } })
    }

    proptest! {
        #[test]
        fn no_secret_stays_and_everything_else_does(
            variables in prop::collection::vec("[A-Z_]{1,8}", 0..4),
            secret in "[!-~]{12,40}",
            levels in prop::collection::vec(0..3, 0..5),
        ) {
            let within = |pod: Value| levels.iter().fold(pod, |inner, level| match level {
                0 => json!({ "kind": "List", "items": [inner, { "value": "a value", "env": "text" }] }),
                1 => json!({ "spec": { "template": inner }, "env": 7, "status": { "value": 1 } }),
                _ => json!([null, inner, "text"]),
            });
            let [mut redacted, expected] = [Some(secret.as_str()), None].map(|secret| within(pod(&variables, secret)));
            redact(&mut redacted);
            prop_assert_eq!(&redacted, &expected);
            redact(&mut redacted);
            prop_assert_eq!(redacted, expected);
        }
    }
}
