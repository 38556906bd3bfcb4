//! The architectures that the agent is built for, with their names in images and in Rust.

use std::str::FromStr;

use anyhow::{Context as _, Result, bail};

/// An architecture, by its name in images.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Arch {
    /// x86-64.
    Amd64,
    /// AArch64.
    Arm64,
}

impl Arch {
    /// All of them.
    pub const ALL: [Self; 2] = [Self::Amd64, Self::Arm64];

    /// This machine's.
    pub fn host() -> Result<Self> {
        match std::env::consts::ARCH {
            "x86_64" => Ok(Self::Amd64),
            "aarch64" => Ok(Self::Arm64),
            other => bail!("the agent is built for x86-64 and AArch64, and this machine is {other}"),
        }
    }

    /// The name in images.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Amd64 => "amd64",
            Self::Arm64 => "arm64",
        }
    }

    /// Rust's target for statically linked programs.
    pub const fn target(self) -> &'static str {
        match self {
            Self::Amd64 => "x86_64-unknown-linux-musl",
            Self::Arm64 => "aarch64-unknown-linux-musl",
        }
    }
}

impl FromStr for Arch {
    type Err = anyhow::Error;

    fn from_str(name: &str) -> Result<Self> {
        Self::ALL
            .into_iter()
            .find(|arch| arch.name() == name)
            .with_context(|| format!("no architecture: {name}"))
    }
}
