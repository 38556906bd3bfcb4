//! Lays out a graph as the steps that the tap programs evaluate, and says what a step cannot do.

use mirror_common::{
    filter::{ACCEPT, FilterProgram, FilterStep, REJECT},
    packet::LEN_OFFSET,
};

use super::{
    graph::{Action, Graph, Next, Node},
    tree::{Test, Tree},
    value::{Field, MAX_IPV4_HEADER, Value},
};

/// The load of a step; the fields are those of [`FilterStep::load`].
#[derive(Clone, Copy)]
struct Load {
    offset: u8,
    size: u8,
    ip_header: u8,
}

/// Whether steps can do these tests; the error says why not.
pub(super) fn check(tree: &Tree) -> Result<(), String> {
    match tree {
        Tree::Always(_) => Ok(()),
        Tree::Test(test) => load(&test.value).map(|_| ()),
        Tree::Set(..) => Err("what depends on the length of a header is not supported".to_owned()),
        Tree::Not(inner) => check(inner),
        Tree::All(parts) | Tree::Any(parts) => parts.iter().try_for_each(check),
    }
}

/// The load of a value; the error says why a step cannot load it.
fn load(value: &Value) -> Result<Load, String> {
    let beyond = || format!("this looks beyond the first {LEN_OFFSET} bytes of the frame");
    let within = |end: Option<u32>| end.filter(|end| *end <= LEN_OFFSET as u32).ok_or_else(beyond);
    let arithmetic = "arithmetic with what stands in the packet is not supported, except '& constant'";
    match value {
        Value::Length => Ok(Load { offset: 0, size: 0, ip_header: 0 }),
        Value::Field(Field { start: None, offset, size }) => {
            within(offset.checked_add((*size).into()))?;
            Ok(Load { offset: *offset as u8, size: *size, ip_header: 0 })
        }
        Value::Field(Field { start: Some(start), offset, size }) => match **start {
            Value::Ipv4Header(header) => {
                let farthest = MAX_IPV4_HEADER + u32::from(*size);
                within(offset.checked_add(farthest))?;
                within(Some(header))?;
                Ok(Load { offset: *offset as u8, size: *size, ip_header: header as u8 })
            }
            _ => Err("an offset that depends on the packet is not supported".to_owned()),
        },
        Value::Binary(..) | Value::Greater(_) => Err(arithmetic.to_owned()),
        Value::Constant(_) | Value::Ipv4Header(_) | Value::Slot(_) => Err(arithmetic.to_owned()),
    }
}

/// The nodes that are reached, each before those that it leads to.
fn order(graph: &Graph) -> Vec<(usize, &Node)> {
    let mut reached = vec![false; graph.nodes.len()];
    let mark = |reached: &mut [bool], target| {
        if let Next::Node(index) = target
            && let Some(place) = reached.get_mut(index)
        {
            *place = true;
        }
    };
    mark(&mut reached, graph.entry);
    let mut order = Vec::new();
    for (index, node) in graph.nodes.iter().enumerate().rev() {
        if reached.get(index) == Some(&true) {
            mark(&mut reached, node.on_true);
            mark(&mut reached, node.on_false);
            order.push((index, node));
        }
    }
    order
}

/// The program of a graph; `None`: it does not fit.
pub(super) fn lay_out(graph: &Graph) -> Option<FilterProgram> {
    let order = order(graph);
    let mut program = FilterProgram::default();
    if graph.entry == Next::Accept {
        // The result does not depend on the frame: a step that every frame passes.
        let test = Test { value: Value::Length, mask: 0, low: 0, high: 0 };
        *program.steps.first_mut()? = step(&test, ACCEPT, ACCEPT)?;
        program.len = 1;
        return Some(program);
    }
    let jump = |target: Next| match target {
        Next::Accept => Some(ACCEPT),
        Next::Reject => Some(REJECT),
        Next::Node(index) => order.iter().position(|(node, _)| *node == index)?.try_into().ok(),
    };
    for (place, (_, node)) in order.iter().enumerate() {
        let Action::Test(test) = &node.action else { return None };
        *program.steps.get_mut(place)? = step(test, jump(node.on_true)?, jump(node.on_false)?)?;
        program.len += 1;
    }
    Some(program)
}

/// `None`: a step cannot do it.
fn step(test: &Test, jump_true: u8, jump_false: u8) -> Option<FilterStep> {
    let Test { value, mask, low, high } = test;
    let Load { offset, size, ip_header } = load(value).ok()?;
    let span = high.saturating_sub(*low);
    let load = FilterStep::load(offset, size, ip_header);
    Some(FilterStep { mask: *mask, low: *low, span, jump_true, jump_false, ..load })
}
