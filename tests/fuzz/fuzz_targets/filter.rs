//! Filter expressions, as annotations and resources have them: each compiles or is refused, and a program that was compiled
//! has an answer for any packet.

#![no_main]

use libfuzzer_sys::fuzz_target;
use mirror_core::filter::{compile, differs_on_segments, ebpf::translate_with, fields_over_ipv4};

fuzz_target!(|input: (&str, &[u8], u32)| {
    let (expression, packet, more) = input;
    differs_on_segments(expression);
    fields_over_ipv4(expression);
    let program = match compile(expression) {
        Ok(program) => program,
        Err(error) => return assert!(expression.is_char_boundary(error.position), "{error:?}"),
    };
    let length = u32::try_from(packet.len()).unwrap_or(u32::MAX).saturating_add(more % 65_536);
    program.matches(packet, length);
    program.explain();
    for has_direct in [true, false] {
        assert!(translate_with(&program, has_direct).is_some(), "what compiles fits into the kernel");
    }
});
