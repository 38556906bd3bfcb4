//! Lays out a graph as instructions.
//!
//! A node computes its value in up to three stages: the index register, the load, the mask. If an earlier node
//! leaves the result of a stage in a register, its jump skips that stage. So each value is loaded once on each
//! path. The first pass over the nodes finds the target stage of each jump. The second pass writes the instructions
//! from the last one to the first, so that the targets of all jumps are known.

use std::collections::HashMap;

use super::{
    super::{
        ast::Operator,
        graph::{Action, Graph, Next, Node},
        tree::Test,
        value::{Field, Value},
    },
    ACCEPT, Condition, Instruction, MAX_INSTRUCTIONS, Operand, Operation, Program, Register,
    registers::{Code, Registers, word},
};

/// The part of a node's value that the registers already hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum Stage {
    Nothing,
    Index,
    Value,
    Masked,
}

/// How a node computes its value.
#[derive(Default)]
struct Plan {
    /// The instructions of each stage.
    stages: [Vec<Operation>; 3],
    /// The targets of its branches.
    ways: [Option<(Next, Stage)>; 2],
}

/// Lays out a graph. `None`: the program is too long.
pub(in super::super) fn lay_out(graph: &Graph) -> Option<Program> {
    let plans = plans(graph)?;
    let mut writer = Writer::default();
    writer.push(Operation::Return(0));
    writer.places.insert((Next::Reject, Stage::Nothing), 0);
    writer.push(Operation::Return(ACCEPT));
    writer.places.insert((Next::Accept, Stage::Nothing), 1);
    for (index, (node, plan)) in graph.nodes.iter().zip(&plans).enumerate() {
        if let Plan { ways: [Some(on_true), Some(on_false)], stages } = plan {
            writer.node(index, node, stages, *on_true, *on_false)?;
        }
        if writer.reversed.len() > MAX_INSTRUCTIONS {
            return None;
        }
    }
    let mut instructions = writer.reversed;
    if graph.entry == Next::Accept {
        instructions = vec![Operation::Return(ACCEPT).encode()];
    }
    instructions.reverse();
    Program::new(instructions)
}

/// The plans of all nodes. Nodes that are not reached have a plan without `ways`. `None`: a value is nested too deeply.
fn plans(graph: &Graph) -> Option<Vec<Plan>> {
    let mut plans: Vec<Plan> = graph.nodes.iter().map(|_| Plan::default()).collect();
    // The contents of the registers on each path to a node, with the stage that the path enters.
    let mut arrivals: Vec<Vec<(Stage, Registers)>> = vec![Vec::new(); graph.nodes.len()];
    let arrive = |arrivals: &mut [Vec<(Stage, Registers)>], target: Next, registers: &Registers| {
        let Next::Node(index) = target else { return Some((target, Stage::Nothing)) };
        let stage = stage(graph.nodes.get(index)?, registers);
        arrivals.get_mut(index)?.push((stage, registers.clone()));
        Some((target, stage))
    };
    arrive(&mut arrivals, graph.entry, &Registers::default());
    for (index, node) in graph.nodes.iter().enumerate().rev() {
        let arrived = std::mem::take(arrivals.get_mut(index)?);
        if arrived.is_empty() {
            continue;
        }
        let (stages, registers) = stages(node, &arrived)?;
        let ways = [node.on_true, node.on_false].map(|target| arrive(&mut arrivals, target, &registers));
        *plans.get_mut(index)? = Plan { stages, ways };
    }
    Some(plans)
}

/// The stage at which a node can begin.
fn stage(node: &Node, registers: &Registers) -> Stage {
    let (value, mask) = wanted(node);
    let is_known = |mask| registers.accumulator.as_ref().is_some_and(|known| *known == (value.clone(), mask));
    if operands(node).is_some() {
        Stage::Nothing
    } else if mask != u32::MAX && is_known(mask) {
        Stage::Masked
    } else if is_known(u32::MAX) {
        Stage::Value
    } else if start(value).is_some_and(|start| registers.index.as_ref() == Some(start)) {
        Stage::Index
    } else {
        Stage::Nothing
    }
}

/// The instructions of the stages, and the contents of the registers at the end. `None`: the value is nested too
/// deeply.
fn stages(node: &Node, arrived: &[(Stage, Registers)]) -> Option<([Vec<Operation>; 3], Registers)> {
    // The facts at a stage: those that hold on all jumps to it, and on the path from the stage before.
    let meet = |stage, before: Option<Registers>| {
        let ways = arrived.iter().filter(|(other, _)| *other == stage).map(|(_, registers)| registers);
        ways.fold(before, |known, way| Some(known.map_or_else(|| way.clone(), |known| known.either(way))))
    };
    let (value, mask) = wanted(node);
    let mut stages = [const { Vec::new() }; 3];
    let [index, load, masked] = &mut stages;
    let mut is_too_deep = false;
    let mut add = |before: Option<Registers>, operations: &mut Vec<Operation>, add: &dyn Fn(&mut Code)| {
        let mut code = Code::new(before?);
        add(&mut code);
        is_too_deep |= code.is_too_deep;
        *operations = code.operations;
        Some(code.registers)
    };
    let known = add(meet(Stage::Nothing, None), index, &|code| {
        if let Some(start) = start(value) {
            code.index(start);
        }
    });
    let known = add(meet(Stage::Index, known), load, &|code| match operands(node) {
        Some((left, right)) => code.operands(left, right),
        None => code.accumulator(value),
    });
    let mut known = add(meet(Stage::Value, known), masked, &|code| {
        if mask != u32::MAX {
            code.push(Operation::Compute(Operator::And, Operand::Constant(mask)));
            code.registers.accumulator = Some((value.clone(), mask));
        }
        if let Action::Set(slot, _) = node.action {
            code.push(Operation::Write(Register::Accumulator, word(slot)));
            code.registers.forget(slot);
        }
    });
    known = meet(Stage::Masked, known);
    if is_too_deep { None } else { Some((stages, known?)) }
}

/// The value that a node needs in the accumulator, and the mask to apply to it.
fn wanted(node: &Node) -> (&Value, u32) {
    match &node.action {
        Action::Test(test) if jumps_on_bits(test) || node.on_true == node.on_false => (&test.value, u32::MAX),
        Action::Test(test) => (&test.value, test.mask),
        Action::Set(_, value) => (value, u32::MAX),
    }
}

/// Whether the test only checks if any bit is set. Then the accumulator needs no mask.
fn jumps_on_bits(Test { mask, low, high, .. }: &Test) -> bool {
    let is_one_bit = mask.is_power_of_two() && low == mask && high == mask;
    *mask != u32::MAX && (is_one_bit || (*low == 0 && *high == 0))
}

/// The value that the index register needs for this load.
fn start(value: &Value) -> Option<&Value> {
    match value {
        Value::Field(Field { start, .. }) => start.as_deref(),
        _ => None,
    }
}

/// The two values that a test compares. The first one is computed in the accumulator.
fn operands(node: &Node) -> Option<(&Value, &Value)> {
    match &node.action {
        Action::Test(Test { value: Value::Greater(parts), .. }) => Some((&parts.0, &parts.1)),
        // The test checks a difference for 0.
        Action::Test(Test {
            value: Value::Binary(Operator::Subtract, parts),
            mask: u32::MAX,
            low: 0,
            high: 0,
        }) if !matches!(**parts, (Value::Constant(_), _) | (_, Value::Constant(_))) => {
            Some((&parts.0, &parts.1))
        }
        _ => None,
    }
}

/// Writes a program from its end to its start.
#[derive(Default)]
struct Writer {
    reversed: Vec<Instruction>,
    /// The position of each stage of a node, counted from the end.
    places: HashMap<(Next, Stage), usize>,
}

impl Writer {
    fn push(&mut self, operation: Operation) {
        self.reversed.push(operation.encode());
    }

    fn node(
        &mut self,
        index: usize,
        node: &Node,
        stages: &[Vec<Operation>; 3],
        on_true: (Next, Stage),
        on_false: (Next, Stage),
    ) -> Option<()> {
        let (on_true, on_false) = (*self.places.get(&on_true)?, *self.places.get(&on_false)?);
        match &node.action {
            _ if on_true == on_false => self.go_on(on_true),
            Action::Test(Test { value: Value::Greater(_), .. }) => {
                self.branch(Condition::Greater, Operand::Index, on_true, on_false);
            }
            Action::Test(_) if operands(node).is_some() => {
                self.branch(Condition::Equal, Operand::Index, on_true, on_false);
            }
            Action::Test(test) => self.test(test, on_true, on_false),
            Action::Set(..) => self.go_on(on_true),
        }
        self.mark(index, Stage::Masked);
        let marks = [Stage::Value, Stage::Index, Stage::Nothing];
        for (operations, stage) in stages.iter().rev().zip(marks) {
            for operation in operations.iter().rev() {
                self.push(*operation);
            }
            self.mark(index, stage);
        }
        Some(())
    }

    fn mark(&mut self, index: usize, stage: Stage) {
        self.places.insert((Next::Node(index), stage), self.reversed.len() - 1);
    }

    /// Makes the program continue with the instruction at this position.
    fn go_on(&mut self, place: usize) {
        let skip = self.reversed.len() - 1 - place;
        if skip > 0 {
            self.far(place, skip);
        }
    }

    /// Writes an instruction that leads to the one at this position.
    fn far(&mut self, place: usize, skip: usize) {
        match self.reversed.get(place).and_then(|target| target.decode()) {
            Some(end @ Operation::Return(_)) => self.push(end),
            _ => self.push(Operation::Jump(skip as u32)),
        }
    }

    fn test(&mut self, test: &Test, on_true: usize, on_false: usize) {
        let Test { value, mask, low, high } = test;
        let greatest = value.greatest().min(*mask);
        let constant = Operand::Constant;
        match (*low, *high) {
            (0, 0) if jumps_on_bits(test) => {
                self.branch(Condition::AnyBit, constant(*mask), on_false, on_true);
            }
            _ if jumps_on_bits(test) => self.branch(Condition::AnyBit, constant(*mask), on_true, on_false),
            (low, high) if low == high => self.branch(Condition::Equal, constant(low), on_true, on_false),
            (0, high) => self.branch(Condition::Greater, constant(high), on_false, on_true),
            (low, high) => {
                let mut place = on_true;
                if high < greatest {
                    self.branch(Condition::Greater, constant(high), on_false, on_true);
                    place = self.reversed.len() - 1;
                }
                self.branch(Condition::GreaterOrEqual, constant(low), place, on_false);
            }
        }
    }

    /// Writes a jump to one of two positions. A conditional jump skips at most 255 instructions, so a farther target
    /// gets an instruction that leads there.
    fn branch(&mut self, condition: Condition, right: Operand, mut on_true: usize, mut on_false: usize) {
        loop {
            let skip = |place| self.reversed.len() - 1 - place;
            let (true_skip, false_skip) = (skip(on_true), skip(on_false));
            match (u8::try_from(true_skip), u8::try_from(false_skip)) {
                (Ok(jt), Ok(jf)) => {
                    self.push(Operation::Branch(condition, right, jt, jf));
                    return;
                }
                (_, Err(_)) => {
                    self.far(on_false, false_skip);
                    on_false = self.reversed.len() - 1;
                }
                (Err(_), _) => {
                    self.far(on_true, true_skip);
                    on_true = self.reversed.len() - 1;
                }
            }
        }
    }
}
