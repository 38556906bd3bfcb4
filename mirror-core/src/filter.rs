//! The filters of mirrors: [`pcap_filter`] compiles an expression to classic BPF, which people can read and the
//! host can evaluate. [`ebpf`] translates classic BPF for the kernel.

pub mod ebpf;
#[cfg(test)]
mod tests;

pub use pcap_filter::{FilterError, Program, classic, differs_on_segments, fields_over_ipv4};

/// Compiles an expression whose program the kernel accepts.
///
/// The program gives the same answers as libpcap's unoptimised program, also on truncated frames.
pub fn compile(text: &str) -> Result<Program, FilterError> {
    let program = pcap_filter::compile(text)?;
    match ebpf::translate(&program) {
        Some(_) => Ok(program),
        None => Err(FilterError::too_large(text)),
    }
}
