//! `cargo xtask lint`: the checks that need not run the product.
//!
//! The checks are: format, clippy, the lints that every crate opts into, the layers (`layers`), dependencies, spelling,
//! the chart, the workflows, and the core on other systems.

use std::fs;

use anyhow::{Context as _, Result, anyhow, ensure};

use crate::{
    chart, ebpf, generate, layers, pins,
    process::{Run as _, command, is_ci, step},
    tools, workspace,
};

/// Runs every check. Stops at the first check that fails.
pub(crate) fn run() -> Result<()> {
    tools::stable()?;
    step("format");
    workspace::rustup_cargo("fmt")
        .args(["--all", "--check"])
        .run()
        .context("`cargo fmt --all` puts it right")?;
    step("every crate takes the workspace's lints");
    opted_in()?;
    step("layers");
    layers::check(&workspace::root())?;
    step("plain English");
    plain_english()?;
    step("spelling");
    let mut typos = tools::cargo_program("typos-cli", "typos", pins::TYPOS)?;
    typos.current_dir(workspace::root()).run()?;
    dependencies()?;
    deployment()?;
    step("clippy");
    tools::bpf()?;
    // The second run is for the levels: `--all-targets` excludes targets with `test = false`.
    for targets in [["--all-targets"].as_slice(), &["--test", "*"]] {
        workspace::members("clippy").args(targets).args(["--", "-Dwarnings"]).run()?;
    }
    other_systems()?;
    step("clippy of the eBPF programs");
    let root = workspace::root();
    ebpf::run(&root, ebpf::Action::Clippy, &root).map_err(|why| anyhow!(why))?;
    step("lint: all is well");
    Ok(())
}

/// Rejects phrases that readers stumbled over: the Kubernetes documentation would use a noun and an active verb.
fn plain_english() -> Result<()> {
    const PHRASES: &str = r"\b(is|are|was|were) told\b|\bwhat (came|comes) of\b|\b(has|have) gone\b|\bso many\b|\bof which\b|\banew\b|\bas ever\b|\bof ours\b|\bwhoever\b|\bstands? (above|on|in|at|beside)\b|\bmakes no sense\b|\bit is tried again\b";
    let mut grep = command("git");
    grep.args(["--no-pager", "grep", "--line-number", "--ignore-case", "--extended-regexp", PHRASES, "--"]);
    grep.args(["*.md", "*.rs", "*.yaml", "*.tpl", "*.txt", ":!xtask/src/lint.rs"]);
    // 1: git has found none.
    let status = grep.current_dir(workspace::root()).status().context("git cannot search the work tree")?;
    ensure!(
        status.code() == Some(1),
        "use the words of the Kubernetes documentation, a noun and an active verb"
    );
    Ok(())
}

/// Checks the kubectl plugin, with the core and the resources, for the systems of laptops. The check needs no linker
/// and no library of these systems, and so no TLS library.
fn other_systems() -> Result<()> {
    const TARGETS: [&str; 2] = ["x86_64-pc-windows-gnu", "aarch64-apple-darwin"];
    step(&format!("kubectl-mirror for {}", TARGETS.join(" and ")));
    let mut check = workspace::cargo("check");
    check.args(["--package", "kubectl-mirror", "--no-default-features"]);
    for target in TARGETS {
        tools::target(target)?;
        check.args(["--target", target]);
        // A dependency contains assembler. A check needs no object of it, so `true` acts as the compiler.
        for tool in ["CC", "AR"] {
            check.env(format!("{tool}_{}", target.replace('-', "_")), "true");
        }
    }
    check.run()
}

/// Checks that every member opts into the lints of the workspace. Cargo cannot enforce that.
fn opted_in() -> Result<()> {
    for manifest in workspace::files(&["*/Cargo.toml", ":!tests/fuzz"])? {
        let has_lints = fs::read_to_string(workspace::root().join(&manifest))?;
        let has_lints = has_lints.contains("[lints]\nworkspace = true\n");
        ensure!(has_lints, "{manifest} does not say `[lints] workspace = true`");
    }
    Ok(())
}

/// Checks the chart, the files that it renders to, and the workflows. This needs helm, and Go to build helm.
fn deployment() -> Result<()> {
    if let Err(why) = tools::helm() {
        if is_ci() {
            return Err(why.context("the chart cannot be checked"));
        }
        println!("    NOT CHECKED: the chart in deploy/, and the workflows: {why:#}");
        return Ok(());
    }
    chart::check()?;
    generate::check()?;
    step("workflows");
    // Without shellcheck and pyflakes, which not every machine has, the result is the same everywhere.
    let mut actionlint = tools::go_program("github.com/rhysd/actionlint/cmd/actionlint", pins::ACTIONLINT)?;
    actionlint.args(["-shellcheck=", "-pyflakes="]).current_dir(workspace::root()).run()
}

/// Checks licences, bans and sources from the crates alone, and advisories with a database that must be downloaded.
fn dependencies() -> Result<()> {
    step("dependencies: licences, bans, sources");
    let deny = || -> Result<std::process::Command> {
        let mut deny = tools::cargo_program("cargo-deny", "cargo-deny", pins::CARGO_DENY)?;
        deny.arg("--locked").current_dir(workspace::root());
        Ok(deny)
    };
    deny()?.args(["check", "licenses", "bans", "sources"]).run()?;
    step("dependencies: advisories");
    if deny()?.args(["fetch", "db"]).succeeds() {
        return deny()?.args(["check", "--disable-fetch", "advisories"]).run();
    }
    println!(
        "    NOT CHECKED: the RustSec database (github.com/RustSec/advisory-db) cannot be fetched from here"
    );
    Ok(())
}
