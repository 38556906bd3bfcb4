//! `kubectl mirror explain`: whether and how a pod is mirrored, as the agent of its node reports.

use mirror_core::status::printable;

use crate::{cli::ExplainArgs, cluster::Cluster, reports::Reports, screen::Screen};

/// Prints the explanation of a pod, or of all pods with this name.
pub(crate) async fn explain(args: ExplainArgs, cluster: &Cluster) -> anyhow::Result<()> {
    let pod = args.pod()?;
    let scope = cluster.scope(args.all_namespaces);
    let reports = if args.all_namespaces {
        let named = [("fieldSelector", format!("metadata.name={}", pod.name))];
        Reports::get(cluster, scope, "podreports", &named).await?
    } else {
        // If there is no such pod, the error is that of kubectl.
        pod.resolve(cluster).await?;
        Reports::get(cluster, scope, &format!("podreports/{}", pod.name), &[]).await?
    };
    let texts: Vec<_> = reports.pods()?.into_iter().filter_map(|pod| pod.explanation).collect();
    Screen::new(false, None, scope).show(&words(&texts))?;
    reports.warn();
    Ok(())
}

/// The texts, one after the other. An agent writes them, so control characters are escaped.
fn words(texts: &[String]) -> String {
    let text = |text: &String| text.lines().map(|line| printable(line) + "\n").collect::<String>();
    texts.iter().map(text).collect::<Vec<_>>().join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_has_its_lines_and_cannot_speak_to_the_terminal() {
        let texts = ["shop/web is mirrored.\n\n  NIC \u{1b}[2J\n", "tools/web is unknown"].map(str::to_owned);
        assert_eq!(words(&texts), "shop/web is mirrored.\n\n  NIC \\u{1b}[2J\n\ntools/web is unknown\n");
        assert_eq!(words(&[]), "");
    }
}
