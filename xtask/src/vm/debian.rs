//! Prepares the guests' kernels, their initramfs and qemu in the cache. `apt` fetches Debian's packages.

use std::{
    fs,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, Result, ensure};

use super::Kernel;
use crate::{
    apt::Apt,
    process::{Run as _, command, find, step},
    programs::{self, Program},
};

/// The programs that prepare a guest's image.
const PROGRAMS: [Program; 6] = [
    Program::of("busybox-static", "busybox"),
    Program::of("cpio", "cpio"),
    Program::of("dpkg", "dpkg-deb"),
    Program::of("kmod", "depmod"),
    Program::of("xz-utils", "xz"),
    Program::of("zstd", "zstd"),
];

/// The kernel modules that a guest loads at its start: for the host's files, and for the tests. Their dependencies are
/// added, as are those of `ON_DEMAND`.
const MODULES: &str = "virtio_pci 9pnet_virtio 9p overlay \
    dummy veth ifb bridge 8021q macvlan ipvlan tun vxlan geneve ip_gre ip6_gre \
    sch_ingress cls_bpf cls_matchall cls_u32 act_mirred act_gact act_bpf act_vlan sch_netem sch_htb sch_prio \
    nf_tables nf_conntrack af_packet_diag inet_diag tcp_diag unix_diag crc32c_generic crc32c_intel";

/// Modules that the kernel loads only when a story needs them.
const ON_DEMAND: &str = "openvswitch ip_vs ip_vs_rr nft_chain_nat nft_ct nft_masq nft_nat";

/// The files with which qemu starts.
pub(super) struct Image {
    /// The kernel's release, as `uname -r` prints it.
    pub(super) release: String,
    pub(super) kernel: PathBuf,
    /// The initramfs: busybox, `init.sh`, the modules.
    pub(super) initramfs: PathBuf,
}

/// The directory of these files in the cache.
pub(super) fn dir() -> Result<PathBuf> {
    Ok(programs::cache_dir()?.join("vm"))
}

/// The image of a kernel. It is prepared once, and again if its packing list or the guest's init has changed.
pub(super) fn image(kernel: Kernel) -> Result<Image> {
    let [series, suite] = kernel.properties();
    let dir = dir()?.join(if series.is_empty() { "newest" } else { series });
    let (unpacked, vmlinuz, initramfs) =
        (dir.join("unpacked"), dir.join("vmlinuz"), dir.join("initramfs.cpio"));
    let made_of = format!("{MODULES}\n{ON_DEMAND}\n{INIT}");
    let stamp = dir.join("made-of");
    if fs::read_to_string(&stamp).is_ok_and(|text| text == made_of) {
        return Ok(Image { release: release(&unpacked)?, kernel: vmlinuz, initramfs });
    }
    programs::bring(&PROGRAMS)?;
    if !unpacked.is_dir() {
        let apt = Apt::new(&[suite])?;
        let packages = apt.newest_kernel(series)?;
        let names: Vec<_> = packages.iter().map(String::as_str).collect();
        step(&format!("bringing {} of {suite} into {}", names[0], dir.display()));
        apt.unpack(&names, &unpacked)?;
    }
    if !unpacked.join("lib").exists() {
        // From Debian 13 on, the package has them only under /usr.
        symlink("usr/lib", unpacked.join("lib"))?;
    }
    let release = release(&unpacked)?;
    step(&format!("preparing the guest of Linux {release}"));
    // From Linux 6.19 on, the kernel is in the directory of its modules.
    let places = [format!("boot/vmlinuz-{release}"), format!("lib/modules/{release}/vmlinuz")];
    let places = places.map(|place| unpacked.join(place));
    let place = places.iter().find(|place| place.exists()).context("a kernel package without a kernel")?;
    fs::copy(place, &vmlinuz)?;
    pack(&unpacked, &release, &dir.join("root"), &initramfs)?;
    fs::write(stamp, made_of)?;
    Ok(Image { release, kernel: vmlinuz, initramfs })
}

const INIT: &str = include_str!("../../vm/init.sh");

/// The kernel's release as `uname -r` prints it, from the name of its directory of modules.
fn release(unpacked: &Path) -> Result<String> {
    let entry =
        fs::read_dir(unpacked.join("lib/modules"))?.next().context("a kernel package without modules")??;
    Ok(entry.file_name().to_string_lossy().into_owned())
}

/// Packs the initramfs without compression, because the emulated CPU would take longer to unpack it than to read it.
fn pack(kernel: &Path, release: &str, root: &Path, to: &Path) -> Result<()> {
    if root.exists() {
        fs::remove_dir_all(root)?;
    }
    let modules = root.join("lib/modules").join(release);
    for dir in ["bin", "sbin", "dev", "proc", "sys"] {
        fs::create_dir_all(root.join(dir))?;
    }
    fs::create_dir_all(&modules)?;
    let source = kernel.join("lib/modules").join(release);
    command("depmod").arg("-b").arg(kernel).arg(release).run()?;
    for name in MODULES.split_whitespace().chain(ON_DEMAND.split_whitespace()) {
        let mut modprobe = command("modprobe");
        modprobe.arg("-d").arg(kernel).args(["-S", release, "--show-depends", name]);
        // If a kernel has the module under another name or not at all, the test that needs it fails.
        let output = modprobe.output()?;
        for line in String::from_utf8_lossy(&output.stdout).lines() {
            let Some(file) = line.strip_prefix("insmod ").and_then(|rest| rest.split_whitespace().next())
            else {
                continue; // built in
            };
            let file = Path::new(file);
            let name = file.strip_prefix(&source).unwrap_or(file);
            add_module(file, &modules.join(name))?;
        }
    }
    for list in ["modules.builtin", "modules.builtin.modinfo", "modules.order"] {
        fs::copy(source.join(list), modules.join(list)).with_context(|| list.to_owned())?;
    }
    command("depmod").arg("-b").arg(root).arg(release).run()?;

    let busybox = find("busybox").context("no busybox")?;
    fs::copy(&busybox, root.join("bin/busybox"))?;
    let applets = command(&busybox).arg("--list").read()?;
    for applet in applets.lines().filter(|name| *name != "busybox") {
        symlink("busybox", root.join("bin").join(applet))?;
    }
    // The path of the program that the kernel calls to load a driver.
    symlink("../bin/busybox", root.join("sbin/modprobe"))?;
    fs::write(root.join("init"), INIT)?;
    fs::write(root.join("modules"), MODULES)?;
    command("chmod").arg("+x").arg(root.join("init")).run()?;
    let mut pack = command("sh");
    pack.args(["-c", r#"find . | cpio --create --format=newc --owner=0:0 --quiet >"$1""#, "sh"]).arg(to);
    pack.current_dir(root).run()
}

/// Copies a module uncompressed, because busybox's modprobe needs that.
fn add_module(from: &Path, to: &Path) -> Result<()> {
    fs::create_dir_all(to.parent().unwrap_or(to))?;
    let unpacker = match from.extension().and_then(|end| end.to_str()) {
        Some("xz") => "xz",
        Some("zst") => "zstd",
        _ => return fs::copy(from, to).map(drop).with_context(|| from.display().to_string()),
    };
    let plain = fs::File::create(to.with_extension(""))?;
    command(unpacker).args(["--decompress", "--stdout"]).arg(from).stdout(plain).run()
}

/// qemu 10.0 or newer. qemu 7.2 crashes guests with two CPUs while their kernel patches its own code.
pub(super) fn qemu() -> Result<Command> {
    const NAME: &str = "qemu-system-x86_64";
    const PACKAGE: &str = "qemu-system-x86";
    let recent = |qemu: &mut Command| version(qemu).is_some_and(|major| major >= 10);
    if recent(&mut command(NAME)) {
        return Ok(command(NAME));
    }
    if !fs::read_to_string("/etc/os-release")?.lines().any(|line| line == "VERSION_CODENAME=bookworm") {
        programs::bring(&[Program::of(PACKAGE, NAME)])?;
        let is_recent = recent(&mut command(NAME));
        ensure!(is_recent, "qemu 10.0 or newer is needed, and this system's {NAME} is older");
        return Ok(command(NAME));
    }
    // Debian 12 has 7.2, and 10.0 in its backports.
    let dir = dir()?.join("qemu");
    if !dir.is_dir() {
        step(&format!("bringing {PACKAGE} of bookworm-backports into {}", dir.display()));
        Apt::new(&["bookworm", "bookworm-backports"])?.unpack_with_libraries(PACKAGE, &dir)?;
    }
    let qemu = || {
        let mut qemu = command(dir.join("usr/bin").join(NAME));
        let libraries = ["usr/lib/x86_64-linux-gnu", "lib/x86_64-linux-gnu"].map(|path| dir.join(path));
        qemu.env("LD_LIBRARY_PATH", std::env::join_paths(libraries).unwrap_or_default());
        qemu
    };
    ensure!(recent(&mut qemu()), "qemu does not start; remove {} to have it brought again", dir.display());
    let mut qemu = qemu();
    qemu.arg("-L").arg(dir.join("usr/share/qemu")).arg("-L").arg(dir.join("usr/share/seabios"));
    Ok(qemu)
}

/// The major version of qemu. `None` if the program does not start.
fn version(qemu: &mut Command) -> Option<u32> {
    let output = qemu.arg("--version").output().ok()?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    text.strip_prefix("QEMU emulator version ")?.split('.').next()?.parse().ok()
}
