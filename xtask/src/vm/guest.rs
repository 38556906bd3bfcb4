//! Boots a guest, prints its console, and reads the result from the last line of its init.

use std::{
    fs,
    io::{BufRead as _, BufReader},
    os::unix::process::ExitStatusExt as _,
    process::{Command, Stdio},
    time::Instant,
};

use anyhow::{Context as _, Result, bail};

use super::{Kernel, debian};
use crate::process::{command, step};

/// The seconds after which a guest counts as hanging. All tests of both levels take 15 to 25 minutes on 2 cores.
const TIME_LIMIT: &str = "3600";
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
    let outcome = watch(&qemu, 2);
    fs::remove_dir_all(&share)?;
    outcome.with_context(|| format!("on Linux {}", image.release))
}

/// Prints the console until qemu ends, or the time limit has passed. Boots the guest this many times if qemu aborts.
fn watch(qemu: &Command, attempts: u32) -> Result<()> {
    let started = Instant::now();
    let mut limited = command("timeout");
    // In the foreground, Ctrl-C ends qemu too.
    limited.args(["--foreground", "--kill-after=10", TIME_LIMIT]).arg(qemu.get_program());
    limited.args(qemu.get_args()).envs(qemu.get_envs().filter_map(|(name, value)| Some((name, value?))));
    let mut child = limited.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().context("qemu")?;
    let console = child.stdout.take().context("qemu has no output")?;
    let mut outcome = None;
    for line in BufReader::new(console).split(b'\n') {
        let line = String::from_utf8_lossy(&line?).into_owned();
        match line.trim_end().split_once(MARKER) {
            Some((_, told)) => outcome = Some(told.to_owned()),
            None => println!("{}", line.trim_end()),
        }
    }
    let status = child.wait()?;
    step(&format!("the guest ran for {:.1} s", started.elapsed().as_secs_f32()));
    match outcome.as_deref() {
        Some("exit code 0") => Ok(()),
        Some(other) => bail!("{other}"),
        None if status.code() == Some(124) => bail!("the guest did not end within {TIME_LIMIT} s"),
        // SIGABRT. qemu 10.0 sometimes fails an assertion in `iotlb_to_section` while a guest boots.
        None if status.signal() == Some(6) && attempts > 1 => watch(qemu, attempts - 1),
        None => bail!("the guest ended without a word, as after a panic (qemu: {status})"),
    }
}
