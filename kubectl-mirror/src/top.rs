//! `kubectl mirror top`: the present rates of the tapped NICs and of their copies, from two readings of all nodes'
//! counters.
//!
//! This module is the loop: it asks the nodes and prints. [`rates`] has the differences and the table.

mod rates;

use std::{collections::BTreeMap, time::Duration};

use tokio::time::{Instant, sleep};

use self::rates::Look;
use crate::{
    cli::TopArgs,
    cluster::Cluster,
    nodes::{self, Answer, Unanswered},
    screen::Screen,
};

/// The interval between two readings.
const PACE: Duration = Duration::from_secs(2);

/// Shows the rates, once or until Ctrl-C.
pub(crate) async fn top(args: TopArgs, cluster: &Cluster) -> anyhow::Result<()> {
    tokio::select! {
        outcome = show(&args, cluster) => outcome,
        _ = tokio::signal::ctrl_c() => Ok(()),
    }
}

async fn show(args: &TopArgs, cluster: &Cluster) -> anyhow::Result<()> {
    let (begun, scope) = (Instant::now(), cluster.scope(args.all_namespaces));
    let mut screen = Screen::new(args.watch, None, scope);
    let mut then = None::<BTreeMap<String, Look>>;
    let mut told = Vec::new();
    loop {
        let answers = nodes::ask(cluster, scope).await?;
        let asked = answers.len();
        let (mut now, mut unanswered) = (BTreeMap::new(), Vec::new());
        for Answer { node, at, status } in answers {
            match status {
                Ok(status) => drop(now.insert(node, Look::new(at.duration_since(begun), status, scope))),
                Err(why) => unanswered.push(Unanswered { node, why }),
            }
        }
        if let Some(then) = &then {
            screen.notes = unanswered.iter().map(|node| format!("{node}\n")).collect();
            screen.show(&rates::table(&rates::rows(then, &now), args.rows))?;
        }
        // A redrawn screen has the messages. Otherwise earlier ones are still visible.
        let is_shown = unanswered == told || screen.is_redrawn && then.is_some();
        let news: &[_] = if is_shown { &[] } else { unanswered.as_slice() };
        let outcome = nodes::tell_unanswered(news, asked);
        if !args.watch || then.is_none() {
            outcome?;
        }
        if !args.watch && then.is_some() {
            return Ok(());
        }
        told = unanswered;
        // A node that has not answered keeps its last reading: its next rates cover a longer time.
        then.get_or_insert_default().extend(now);
        sleep(PACE).await;
    }
}
