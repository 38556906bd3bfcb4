//! The pinned versions of everything that the tasks install. This is the only place to change them.
//!
//! The file has only constants, so that the build scripts can include it too.

/// Rust for the host: builds, tests and lints everything except the eBPF programs.
pub(crate) const STABLE: &str = "1.99.1";
/// Rust for the eBPF programs. Its LLVM must be of [`LLVM_MAJOR`]: nightlies from August 2026 on have LLVM 23, for
/// which there is no Debian package.
pub(crate) const NIGHTLY: &str = "nightly-2026-07-15";
/// The LLVM for bpf-linker. Its clang compiles for other architectures.
pub(crate) const LLVM_MAJOR: &str = "22";
/// Links the eBPF programs and makes their BTF.
pub(crate) const BPF_LINKER: &str = "0.13.0";
/// Checks licences, bans, sources and advisories of the dependencies.
pub(crate) const CARGO_DENY: &str = "0.20.2";
/// Runs the targets of `tests/fuzz`.
pub(crate) const CARGO_FUZZ: &str = "0.13.1";
/// Checks spelling.
pub(crate) const TYPOS: &str = "1.52.0";
/// Renders and checks the chart.
pub(crate) const HELM: &str = "3.22.0";
/// Makes the chart's README.
pub(crate) const HELM_DOCS: &str = "1.14.2";
/// Checks the rendered chart with the schemas of Kubernetes.
pub(crate) const KUBECONFORM: &str = "0.8.0";
/// The versions of these schemas: the oldest with all features of the chart, and the newest.
pub(crate) const KUBERNETES: [&str; 2] = ["1.30.14", "1.37.2"];
