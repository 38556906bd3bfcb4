//! Builds the eBPF object that the agent embeds, and sets the agent's version.

#[path = "../xtask/src/ebpf.rs"]
#[expect(dead_code, reason = "what is for the tasks only")]
mod ebpf;
#[path = "../xtask/src/pins.rs"]
#[expect(dead_code, reason = "as above")]
mod pins;

use std::{
    env,
    path::{Path, PathBuf},
    process::Command,
};

fn main() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let root = root.canonicalize().unwrap_or(root);
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed=src");
    let revision = commit(&root).unwrap_or_else(|| "unknown".to_owned());
    println!("cargo::rustc-env=PODMIRROR_REVISION={revision}");
    println!("cargo::rustc-env=PODMIRROR_VERSION={} ({revision})", env!("CARGO_PKG_VERSION"));
    ebpf::rerun_if_changed(&root);
    let out_dir = PathBuf::from(env::var_os("OUT_DIR").unwrap_or_default());
    match ebpf::run(&root, ebpf::Action::Build, &out_dir) {
        Ok(objects) => println!("cargo::rustc-env=PODMIRROR_EBPF={}", objects.mirror.display()),
        Err(why) => println!("cargo::error={why}"),
    }
}

/// Returns the commit as in "1a2b3c4d5e6f", with "-dirty" if the work tree has uncommitted changes. `None` without git.
fn commit(root: &Path) -> Option<String> {
    // A source archive may be inside of another repository.
    if Path::new(&git(root, &["rev-parse", "--show-toplevel"])?).canonicalize().ok()? != root {
        return None;
    }
    // Every commit and checkout writes to one of these files; in a linked work tree they are not in `.git`.
    let branch = git(root, &["rev-parse", "--symbolic-full-name", "HEAD"])?;
    for file in ["HEAD", "logs/HEAD", "packed-refs", &branch] {
        let path = root.join(git(root, &["rev-parse", "--git-path", file])?);
        if path.is_file() {
            println!("cargo::rerun-if-changed={}", path.display());
        }
    }
    let commit = git(root, &["rev-parse", "--short=12", "HEAD"])?;
    let changes = git(root, &["status", "--porcelain", "--untracked-files=no"])?;
    Some(if changes.is_empty() { commit } else { commit + "-dirty" })
}

/// Returns the output of git, without the index lock that `git status` would take during a running `git commit`.
fn git(root: &Path, arguments: &[&str]) -> Option<String> {
    let output =
        Command::new("git").arg("--no-optional-locks").args(arguments).current_dir(root).output().ok()?;
    output.status.success().then(|| String::from_utf8_lossy(&output.stdout).trim().to_owned())
}
