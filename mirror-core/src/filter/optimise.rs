//! Makes a program shorter without changing its answer, on truncated frames too.
//!
//! A round goes through the graph from its start. It gathers the facts about a frame at each test from all ways that
//! lead there, and sends each way past the tests whose outcome is known. A test is left out only where its load is
//! known to succeed, because a load beyond the frame is an answer of its own.

use super::{
    facts::Facts,
    graph::{Graph, Next, Node},
};

/// Every round makes ways shorter, and the first few rounds make most of the progress. The answer is right after any
/// round.
const MAX_ROUNDS: usize = 16;

/// The shorter program.
pub(super) fn optimise(mut graph: Graph) -> Graph {
    for _ in 0..MAX_ROUNDS {
        let before = (graph.nodes.clone(), graph.entry);
        graph = round(graph);
        if (&graph.nodes, graph.entry) == (&before.0, before.1) {
            break;
        }
    }
    graph
}

fn round(mut graph: Graph) -> Graph {
    let mut known: Vec<Option<Facts>> = vec![None; graph.nodes.len()];
    graph.entry = follow(&graph, graph.entry, &Facts::default());
    arrive(&mut known, graph.entry, Facts::default());
    for index in (0..graph.nodes.len()).rev() {
        let (Some(facts), Some(node)) = (known.get(index).cloned().flatten(), graph.node(Next::Node(index)))
        else {
            continue;
        };
        let way = |passed| Some((facts.after(&node.test, passed)?, node.target(passed)));
        let ways = [way(true), way(false)].map(|way| {
            let (facts, target) = way?;
            let target = follow(&graph, target, &facts);
            arrive(&mut known, target, facts);
            Some(target)
        });
        let (on_true, on_false) = match ways {
            [Some(on_true), Some(on_false)] => (on_true, on_false),
            [Some(only), None] | [None, Some(only)] => (only, only),
            // No frame that is long enough can come here.
            [None, None] => (Next::Reject, Next::Reject),
        };
        if let Some(place) = graph.nodes.get_mut(index) {
            *place = Node { on_true, on_false, ..node };
        }
    }
    rebuilt(&graph, &known)
}

/// Where a frame with these `facts` meets a test with an unknown outcome.
fn follow(graph: &Graph, mut target: Next, facts: &Facts) -> Next {
    while let Some(node) = graph.node(target) {
        let outcome = facts.outcome(&node.test).or((node.on_true == node.on_false).then_some(true));
        match outcome {
            Some(passed) if facts.in_bounds(node.test.load) => target = node.target(passed),
            _ => break,
        }
    }
    target
}

/// Adds another way to those that lead to `target`.
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

/// The graph made again, without unreachable nodes, and with equal tests merged.
fn rebuilt(graph: &Graph, known: &[Option<Facts>]) -> Graph {
    let mut new = Graph::empty();
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
        moved.push(if on_true == on_false && facts.in_bounds(node.test.load) {
            on_true
        } else {
            new.add(Node { test: node.test, on_true, on_false })
        });
    }
    new.entry = renamed(graph.entry, &moved);
    new
}

impl Node {
    fn target(&self, passed: bool) -> Next {
        if passed { self.on_true } else { self.on_false }
    }
}
