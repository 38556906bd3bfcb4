//! `kill-at STEP FILE PROGRAM ARGUMENT...` runs a program, and kills it by SIGKILL at the entry of one of its steps.
//!
//! A step is a system call that changes something outside of the program: BPF objects, pins, devices. STEP counts from
//! 1, over all threads; with 0 the program is not killed. `map:STEP` counts only the system calls that change an
//! element of a map, and only while the file `FILE.wait` does not exist. The number of steps is written to FILE.
//! SIGTERM is forwarded to the program.

use std::{
    env,
    error::Error,
    ffi::OsStr,
    fs,
    path::Path,
    process::{Command, ExitCode},
    thread,
};

use nix::{
    errno::Errno,
    sys::{
        ptrace::{self, Options},
        signal::{SigSet, Signal, kill},
        wait::{WaitPidFlag, WaitStatus, waitpid},
    },
    unistd::Pid,
};

/// The commands of bpf(2) that create, change or delete something: BPF_MAP_CREATE, BPF_MAP_UPDATE_ELEM,
/// BPF_MAP_DELETE_ELEM, BPF_PROG_LOAD, BPF_OBJ_PIN, BPF_LINK_CREATE, BPF_LINK_UPDATE, BPF_LINK_DETACH.
const BPF_CHANGES: [u64; 8] = [0, 2, 3, 5, 6, 28, 29, 34];
/// The commands that change an element of a map.
const MAP_CHANGES: [u64; 2] = [2, 3];

/// Other system calls: netlink requests, and files.
#[rustfmt::skip]
const CHANGES: &[i64] = &[
    libc::SYS_sendto, libc::SYS_sendmsg, libc::SYS_unlinkat, libc::SYS_mkdirat, libc::SYS_renameat2,
    libc::SYS_symlinkat,
    #[cfg(target_arch = "x86_64")] libc::SYS_unlink,
    #[cfg(target_arch = "x86_64")] libc::SYS_mkdir,
    #[cfg(target_arch = "x86_64")] libc::SYS_rmdir,
    #[cfg(target_arch = "x86_64")] libc::SYS_rename,
    #[cfg(target_arch = "x86_64")] libc::SYS_symlink,
];

fn main() -> Result<ExitCode, Box<dyn Error>> {
    let mut arguments = env::args_os().skip(1);
    let mut next = || arguments.next().ok_or("usage: kill-at STEP FILE PROGRAM ARGUMENT...");
    let step = next()?.to_string_lossy().into_owned();
    let (only_maps, step) = step.strip_prefix("map:").map_or((false, &*step), |step| (true, step));
    let step: u32 = step.parse()?;
    let file = next()?;
    let wait = [&*file, OsStr::new(".wait")].join(OsStr::new(""));

    // The program is stopped until it is traced.
    let program =
        Command::new("sh").args(["-c", "kill -STOP $$; exec \"$@\"", "sh"]).args(arguments).spawn()?;
    let pid = Pid::from_raw(program.id().cast_signed());
    waitpid(pid, Some(WaitPidFlag::WUNTRACED))?;
    ptrace::seize(
        pid,
        Options::PTRACE_O_TRACESYSGOOD | Options::PTRACE_O_TRACECLONE | Options::PTRACE_O_EXITKILL,
    )?;
    let terminations = SigSet::from_iter([Signal::SIGTERM]);
    terminations.thread_block()?;
    thread::spawn(move || {
        while terminations.wait().is_ok() {
            // This fails only if the program has just ended.
            let _ = kill(pid, Signal::SIGTERM);
        }
    });
    kill(pid, Signal::SIGCONT)?;

    let mut steps = 0;
    let code = loop {
        match waitpid(None, Some(WaitPidFlag::__WALL))? {
            WaitStatus::Exited(of, code) if of == pid => break code.try_into()?,
            WaitStatus::Signaled(of, signal, _) if of == pid => break 128 + u8::try_from(signal as i32)?,
            WaitStatus::PtraceSyscall(of) => {
                let counts = begins_step(of, only_maps)? && !(only_maps && Path::new(&wait).exists());
                steps += u32::from(counts);
                if steps == step && step > 0 {
                    // No thread begins another step: each stops at its next one until this tracer resumes it.
                    kill(pid, Signal::SIGKILL)?;
                } else {
                    resume(of, None)?;
                }
            }
            WaitStatus::PtraceEvent(of, ..) => resume(of, None)?,
            WaitStatus::Stopped(of, signal) => resume(of, Some(signal))?,
            _ => {}
        }
    };
    fs::write(file, steps.to_string())?;
    Ok(ExitCode::from(code))
}

/// Resumes a thread. A thread that SIGKILL has ended meanwhile is no error.
fn resume(thread: Pid, signal: Option<Signal>) -> nix::Result<()> {
    match ptrace::syscall(thread, signal) {
        Err(Errno::ESRCH) => Ok(()),
        done => done,
    }
}

/// Whether a thread has stopped at the entry of a step, and not at its exit.
fn begins_step(thread: Pid, only_maps: bool) -> nix::Result<bool> {
    let info = match ptrace::syscall_info(thread) {
        Err(Errno::ESRCH) => return Ok(false),
        info => info?,
    };
    if info.op != libc::PTRACE_SYSCALL_INFO_ENTRY {
        return Ok(false);
    }
    // SAFETY: `op` says that the union holds an entry.
    let entry = unsafe { info.u.entry };
    let number = entry.nr.cast_signed();
    let is_bpf = |commands: &[u64]| number == libc::SYS_bpf && commands.contains(&entry.args[0]);
    Ok(if only_maps { is_bpf(&MAP_CHANGES) } else { CHANGES.contains(&number) || is_bpf(&BPF_CHANGES) })
}
