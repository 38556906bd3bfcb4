//! A compiled filter as readable lines.

use std::fmt::Write as _;

use mirror_common::filter::{ACCEPT, FilterProgram, FilterStep, REJECT};

/// One line for each step: its test, and the step that each outcome leads to.
pub fn explain(program: &FilterProgram) -> String {
    let mut text = String::new();
    for (index, step) in program.steps.iter().take(program.len as usize).enumerate() {
        let test = test(step);
        let (yes, no) = (target(step.jump_true), target(step.jump_false));
        // Writing to a string does not fail.
        let _ = writeln!(text, "{index:>3}  {test:<44}  yes: {yes:<6}  no: {no}");
    }
    text
}

fn test(step: &FilterStep) -> String {
    let FilterStep { mask, low, span, offset, end, ip_header, .. } = *step;
    let load = match (end.saturating_sub(offset), ip_header) {
        (0, _) => "length".to_owned(),
        (size, 0) => format!("frame[{offset}:{size}]"),
        (size, header) => format!("frame[{offset} + length of IPv4 header at {header} : {size}]"),
    };
    let value = if mask == u32::MAX { load } else { format!("{load} & {mask:#x}") };
    match span {
        0 => format!("{value} = {low:#x}"),
        _ if low.saturating_add(span) == u32::MAX => format!("{value} >= {low:#x}"),
        _ => format!("{value} in {low:#x}..={:#x}", low.saturating_add(span)),
    }
}

fn target(jump: u8) -> String {
    match jump {
        ACCEPT => "accept".to_owned(),
        REJECT => "reject".to_owned(),
        step => step.to_string(),
    }
}
