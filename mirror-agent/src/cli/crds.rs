//! `mirror-agent crds`: prints the CRDs of this version in YAML.
//!
//! Pure. For CRD upgrades, and for the file of the chart, which `cargo xtask gen` writes.

use anyhow::Context as _;

/// The CRDs, one YAML document each.
pub(super) fn crds() -> anyhow::Result<String> {
    let mut text = String::new();
    for crd in mirror_api::crds() {
        let crd = serde_saphyr::to_string(&crd).context("cannot write a CRD as YAML")?;
        text += "---\n";
        text += &crd;
    }
    Ok(text)
}
