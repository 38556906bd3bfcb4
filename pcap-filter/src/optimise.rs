//! Shortens a program without changing its answers, on truncated frames too.
//!
//! A round walks the graph from its start. At each test it merges the facts about a frame from all paths that lead
//! there, and redirects each path past the tests whose outcome is known. A test is skipped only if its load is known to
//! succeed, because a load beyond the frame changes the answer.

use super::{
    PER_TEST, Work,
    facts::Facts,
    graph::{Action, Graph, Next, Node},
    tree::Test,
    value::{Slots, Value},
};

/// Maximum number of rounds. Every round shortens paths, and the first few make most of the progress. The answer is
/// correct after any round.
const MAX_ROUNDS: usize = 16;

/// Optimises a graph. `None`: it needs too much work.
pub(super) fn optimise(mut graph: Graph, work: &mut Work) -> Option<Graph> {
    for _ in 0..MAX_ROUNDS {
        let before = (graph.nodes.clone(), graph.entry);
        graph = round(graph, work)?;
        if (&graph.nodes, graph.entry) == (&before.0, before.1) {
            break;
        }
    }
    Some(graph)
}

fn round(mut graph: Graph, work: &mut Work) -> Option<Graph> {
    work.take(PER_TEST * graph.nodes.len())?;
    let mut known: Vec<Option<Facts>> = vec![None; graph.nodes.len()];
    graph.entry = follow(&graph, graph.entry, &Facts::default());
    arrive(&mut known, graph.entry, Facts::default());
    for index in (0..graph.nodes.len()).rev() {
        let (Some(facts), Some(node)) = (known.get(index).cloned().flatten(), graph.nodes.get(index)) else {
            continue;
        };
        work.take(facts.len())?;
        let way = |passed| {
            let facts = match &node.action {
                Action::Test(test) => facts.after(test, passed),
                Action::Set(slot, value) => facts.after_set(*slot, value),
            }?;
            let target = follow(&graph, node.target(passed), &facts);
            Some((target, facts))
        };
        let ways = [way(true), way(false)].map(|way| {
            let (target, facts) = way?;
            arrive(&mut known, target, facts);
            Some(target)
        });
        let (on_true, on_false) = match ways {
            [Some(on_true), Some(on_false)] => (on_true, on_false),
            [Some(only), None] | [None, Some(only)] => (only, only),
            // No frame that is long enough can reach this node.
            [None, None] => (Next::Reject, Next::Reject),
        };
        if let Some(node) = graph.nodes.get_mut(index) {
            (node.on_true, node.on_false) = (on_true, on_false);
        }
    }
    Some(rebuilt(&graph, &known))
}

/// The next node for a frame with these `facts`: a test with an unknown outcome, or a set slot.
fn follow(graph: &Graph, mut target: Next, facts: &Facts) -> Next {
    while let Some(Node { action: Action::Test(test), on_true, on_false }) = graph.node(target) {
        let outcome = facts.outcome(test).or((on_true == on_false).then_some(true));
        match outcome {
            Some(passed) if facts.in_bounds(&test.value) => {
                target = if passed { *on_true } else { *on_false }
            }
            _ => break,
        }
    }
    target
}

/// Adds a path to those that lead to `target`.
fn arrive(known: &mut [Option<Facts>], target: Next, facts: Facts) {
    if let Next::Node(index) = target
        && let Some(place) = known.get_mut(index)
    {
        *place = Some(match place.take() {
            Some(others) => others.either(&facts),
            None => facts,
        });
    }
}

/// Rebuilds the graph without unreachable nodes and unused slots, and with equal nodes merged.
fn rebuilt(graph: &Graph, known: &[Option<Facts>]) -> Graph {
    let mut new = Graph::empty();
    // The slots that are used from each new node on.
    let mut used: Vec<Slots> = Vec::new();
    let mut moved: Vec<Next> = Vec::with_capacity(graph.nodes.len());
    let renamed = |target: Next, moved: &[Next]| match target {
        Next::Node(index) => moved.get(index).copied().unwrap_or(Next::Reject),
        end => end,
    };
    for (node, facts) in graph.nodes.iter().zip(known) {
        let Some(facts) = facts else {
            moved.push(Next::Reject);
            continue;
        };
        let (on_true, on_false) = (renamed(node.on_true, &moved), renamed(node.on_false, &moved));
        let used_by = |target| match target {
            Next::Node(index) => used.get(index).copied().unwrap_or_default(),
            Next::Accept | Next::Reject => Slots::default(),
        };
        let mut needed = used_by(on_true).union(used_by(on_false));
        let action = match &node.action {
            Action::Set(slot, value) if !needed.contains(*slot) => Action::Test(computes(value)),
            other => other.clone(),
        };
        if let Action::Test(test) = &action
            && on_true == on_false
            && facts.in_bounds(&test.value)
        {
            moved.push(on_true);
            continue;
        }
        if let Action::Set(slot, _) = action {
            needed = needed.without(slot);
        }
        needed = needed.union(node.value().slots());
        let next = new.add(Node { action, on_true, on_false });
        if new.nodes.len() > used.len() {
            used.push(needed);
        }
        moved.push(next);
    }
    new.entry = renamed(graph.entry, &moved);
    new
}

/// A test that passes for every frame that has this value.
fn computes(value: &Value) -> Test {
    Test { value: value.clone(), mask: 0, low: 0, high: 0 }
}
