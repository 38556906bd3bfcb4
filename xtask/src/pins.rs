//! The pinned versions of everything that the tasks install. This is the only place to change them.
//!
//! The file has only constants, so that the build scripts can include it too. Renovate updates those with a comment for it
//! (`renovate.json`).

/// Rust for the host: builds, tests and lints everything except the eBPF programs.
// renovate: datasource=github-releases depName=rust-lang/rust
pub(crate) const STABLE: &str = "1.99.1";
/// Rust for the eBPF programs. Its LLVM must be of [`LLVM_MAJOR`]: nightlies from August 2026 on have LLVM 23, for
/// which there is no Debian package.
pub(crate) const NIGHTLY: &str = "nightly-2026-07-15";
/// The LLVM for bpf-linker. Its clang compiles for other architectures.
pub(crate) const LLVM_MAJOR: &str = "22";
/// Links the eBPF programs and makes their BTF.
// renovate: datasource=crate depName=bpf-linker
pub(crate) const BPF_LINKER: &str = "0.13.0";
/// Checks licences, bans, sources and advisories of the dependencies.
// renovate: datasource=crate depName=cargo-deny
pub(crate) const CARGO_DENY: &str = "0.20.2";
/// Runs the targets of `tests/fuzz`.
// renovate: datasource=crate depName=cargo-fuzz
pub(crate) const CARGO_FUZZ: &str = "0.13.1";
/// Checks spelling.
// renovate: datasource=crate depName=typos-cli
pub(crate) const TYPOS: &str = "1.52.0";
/// Renders and checks the chart.
// renovate: datasource=go depName=helm.sh/helm/v3
pub(crate) const HELM: &str = "3.22.0";
/// Makes the chart's README.
// renovate: datasource=go depName=github.com/norwoodj/helm-docs
pub(crate) const HELM_DOCS: &str = "1.14.2";
/// Checks the workflows of the forge.
// renovate: datasource=go depName=github.com/rhysd/actionlint
pub(crate) const ACTIONLINT: &str = "1.7.12";
/// Signs releases.
// renovate: datasource=go depName=github.com/sigstore/cosign/v2
pub(crate) const COSIGN: &str = "2.6.5";
/// Pushes releases to a registry.
// renovate: datasource=go depName=github.com/google/go-containerregistry
pub(crate) const CRANE: &str = "0.22.1";
/// Installs the plugin in the level release.
// renovate: datasource=go depName=sigs.k8s.io/krew
pub(crate) const KREW: &str = "0.4.3";
/// The registry of the level release.
// renovate: datasource=go depName=github.com/distribution/distribution/v3
pub(crate) const REGISTRY: &str = "3.1.2";
/// Links programs for macOS.
// renovate: datasource=pypi depName=ziglang
pub(crate) const ZIG: &str = "0.17.0";
/// Makes cargo link with zig.
// renovate: datasource=pypi depName=cargo-zigbuild
pub(crate) const ZIGBUILD: &str = "0.24.0";
/// The oldest version with all features of the chart, and the newest: of the API servers in the level api-versions.
// renovate: datasource=go depName=k8s.io/kubernetes
pub(crate) const KUBERNETES: [&str; 2] = ["1.30.14", "1.37.2"];
