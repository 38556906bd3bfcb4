//! Boots a guest, prints its console, and reads the result from the last line of its init.

use std::{
    fs,
    io::{BufRead as _, BufReader},
    process::Stdio,
    sync::mpsc,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail};

use super::{Kernel, debian};
use crate::process::step;

/// Time after which a guest counts as hanging. All tests of both levels take 15 to 25 minutes on 2 cores.
const TIME_LIMIT: Duration = Duration::from_secs(60 * 60);
/// The beginning of the line with the result.
const MARKER: &str = "podmirror-vm: ";

/// The guest's devices, with this machine's files. The CPU is `max` without two features that make the emulator copy
/// byte by byte.
const MACHINE: &str = "-machine q35 -accel tcg,thread=multi -cpu max,-erms,-fsrm -smp 2 -m 1024 \
    -nodefaults -no-user-config -display none -no-reboot -serial stdio -device virtio-rng-pci \
    -fsdev local,id=root,path=/,security_model=none,readonly=on,multidevs=remap \
    -device virtio-9p-pci,fsdev=root,mount_tag=root";

/// Runs a shell script in a guest with this kernel.
pub(super) fn boot(kernel: Kernel, script: &str) -> Result<()> {
    let image = debian::image(kernel)?;
    let mut qemu = debian::qemu()?;
    let share = debian::dir()?.join(format!("share-{}", std::process::id()));
    fs::create_dir_all(&share)?;
    fs::write(share.join("run"), script)?;

    qemu.args(MACHINE.split_whitespace());
    qemu.arg("-kernel").arg(&image.kernel).arg("-initrd").arg(&image.initramfs);
    qemu.args(["-append", "console=ttyS0 quiet panic=-1 dummy.numdummies=0 ifb.numifbs=0"]);
    let share_option = format!("local,id=share,path={},security_model=none", share.display());
    qemu.args(["-fsdev", &share_option, "-device", "virtio-9p-pci,fsdev=share,mount_tag=share"]);

    step(&format!("booting Linux {}", image.release));
    let outcome = watch(qemu.stdin(Stdio::null()).stdout(Stdio::piped()));
    fs::remove_dir_all(&share)?;
    outcome.with_context(|| format!("on Linux {}", image.release))
}

/// Prints the console until qemu ends or the time limit has passed.
fn watch(qemu: &mut std::process::Command) -> Result<()> {
    let started = Instant::now();
    let mut child = qemu.spawn().context("qemu")?;
    let console = child.stdout.take().context("qemu has no output")?;
    let (sender, lines) = mpsc::channel();
    thread::spawn(move || {
        for line in BufReader::new(console).split(b'\n').map_while(Result::ok) {
            if sender.send(String::from_utf8_lossy(&line).trim_end().to_owned()).is_err() {
                break;
            }
        }
    });
    let mut last = None;
    let outcome = loop {
        match lines.recv_timeout(TIME_LIMIT.saturating_sub(started.elapsed())) {
            Ok(line) => match line.split_once(MARKER) {
                Some((_, outcome)) => last = Some(outcome.to_owned()),
                None => println!("{line}"),
            },
            Err(mpsc::RecvTimeoutError::Disconnected) => break last,
            Err(mpsc::RecvTimeoutError::Timeout) => {
                child.kill()?;
                break Some(format!("the guest did not end within {} s", TIME_LIMIT.as_secs()));
            }
        }
    };
    let status = child.wait()?;
    step(&format!("the guest ran for {:.1} s", started.elapsed().as_secs_f32()));
    match outcome.as_deref() {
        Some("exit code 0") => Ok(()),
        Some(other) => bail!("{other}"),
        None => bail!("the guest ended without a word, as after a panic (qemu: {status})"),
    }
}
