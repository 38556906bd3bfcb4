//! Runs `mirror-agent tail` and `mirror-agent capture`, and reads the pcapng files that they write.
//!
//! The reader of files is not the agent's code: it implements the few parts of the format that these stories need
//! (draft-ietf-opsawg-pcapng).

use std::{
    fs::{self, File},
    io::{self, PipeReader},
    net::IpAddr,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
};

use nix::sys::signal::Signal;

use crate::{Captured, Exit, Frames, Lab, eventually, process::Process};

/// A running `tail` or `capture`. It is killed on drop.
#[derive(Debug)]
pub struct Tail {
    process: Process,
    /// Output file, or the name of standard output.
    file: PathBuf,
}

impl Tail {
    /// Starts `tail` or `capture` with these arguments and a file, and waits until it reads.
    #[track_caller]
    pub fn start(lab: &Lab, arguments: &[&str]) -> Self {
        let mut tail = Self::spawn(lab, arguments);
        tail.wait_until_it_reads(lab);
        tail
    }

    /// Starts the command repeatedly while the agent refuses it, and waits until it reads.
    #[track_caller]
    pub fn start_when_free(lab: &Lab, arguments: &[&str]) -> Self {
        eventually(crate::SOON, || {
            let mut tail = Self::spawn(lab, arguments);
            while !tail.file.exists() {
                crate::check(tail.process.ended().is_none(), || format!("{:#?}", tail.process.lines()))?;
                std::thread::yield_now();
            }
            Ok(tail)
        })
    }

    /// As [`Tail::start`] with its standard output, a pipe, instead of a file. Also returns the pipe.
    #[track_caller]
    pub fn piped(lab: &Lab, arguments: &[&str]) -> (Self, PipeReader) {
        let (reader, writer) = io::pipe().unwrap();
        // `capture` accepts only a path.
        let file = PathBuf::from(if arguments[0] == "tail" { "-" } else { "/dev/stdout" });
        let mut command = lab.agent(arguments);
        let process = Process::start(command.arg("-w").arg(&file).stdout(writer));
        // The command holds the other end of the pipe, too.
        drop(command);
        let mut tail = Self { process, file };
        tail.wait_until_it_reads(lab);
        (tail, reader)
    }

    /// Waits until packets are copied to the command.
    #[track_caller]
    pub fn wait_until_it_reads(&mut self, lab: &Lab) {
        let is_file = self.file != Path::new("-");
        eventually(crate::SOON, || {
            let ended = self.process.ended();
            assert!(ended.is_none(), "it has ended ({ended:?}): {:#?}", self.process.lines());
            // The file is created when the session exists. The programs of a new tap are attached a little later.
            let status = lab.try_status()?;
            let is_read = |target: &&crate::Target| target.stream && target.up;
            let reads = status.targets.iter().any(|target| is_read(&target))
                && status.taps.iter().all(crate::TapStatus::is_attached);
            // Without a file, the first tap shows that the session exists.
            let has_session = if is_file { self.file.exists() } else { !status.taps.is_empty() };
            crate::check(has_session && reads, || format!("no tail yet: {status:#?}"))
        });
    }

    /// The same, without waiting.
    pub fn spawn(lab: &Lab, arguments: &[&str]) -> Self {
        let file = lab.files().join(format!("tail-{}.pcapng", arguments.concat().replace('/', "-")));
        Self::into_fifo(lab, arguments, &file)
    }

    /// The same, with this FIFO instead of the file.
    pub fn into_fifo(lab: &Lab, arguments: &[&str], file: &Path) -> Self {
        let file = file.to_owned();
        let mut command = lab.agent(arguments);
        Self::of(command.arg("-w").arg(&file), file)
    }

    /// Starts this command, which writes the file.
    pub fn of(command: &mut Command, file: PathBuf) -> Self {
        Self { process: Process::start(command), file }
    }

    /// The process's pid.
    pub fn pid(&self) -> u32 {
        self.process.pid()
    }

    /// Path of the file.
    pub fn path(&self) -> &Path {
        &self.file
    }

    /// The content of the file so far.
    #[track_caller]
    pub fn file(&self) -> PacketFile {
        PacketFile::read(&self.file)
    }

    /// Stops the process from reading (SIGSTOP).
    pub fn pause(&self) {
        self.process.pause();
    }

    /// Continues the process.
    pub fn go_on(&self) {
        self.process.go_on();
    }

    /// Requests a file of the packets that the process has kept so far.
    pub fn save(&self) {
        self.process.signal(Signal::SIGUSR1);
    }

    /// Ends the process as Ctrl-C does. It must exit with 0.
    #[track_caller]
    pub fn stop(mut self) -> PacketFile {
        let status = self.process.end(Signal::SIGINT);
        assert_eq!(status.code(), Some(0), "{:#?}", self.process.lines());
        self.file()
    }

    /// Waits until the process ends by itself. It must exit with 0.
    #[track_caller]
    pub fn wait(mut self) -> PacketFile {
        let status = self.process.wait();
        assert_eq!(status.code(), Some(0), "{:#?}", self.process.lines());
        self.file()
    }

    /// Waits until the process ends by itself, and also returns its exit code.
    #[track_caller]
    pub fn end(mut self) -> (Option<i32>, PacketFile) {
        let status = self.process.wait();
        (status.code(), self.file())
    }

    /// Waits for a log line with this text.
    #[track_caller]
    pub fn wait_for_log(&mut self, text: &str) {
        self.process.wait_for_line(text);
    }

    /// Interrupts the process, as Ctrl-C does, without waiting.
    pub fn interrupt(&self) {
        self.process.signal(Signal::SIGINT);
    }

    /// Waits for the end, and returns exit code and output.
    #[track_caller]
    pub fn exit(mut self) -> Exit {
        let code = self.process.wait().code();
        Exit { code, stdout: String::new(), stderr: self.process.lines().join("\n") }
    }

    /// Kills the process.
    pub fn kill(mut self) {
        self.process.end(Signal::SIGKILL);
    }
}

/// `mirror-agent tail ... -w - | tee FILE | tcpdump -nr -`. `tee` and tcpdump end when `tail` closes the pipe.
#[derive(Debug)]
pub struct PipedTail {
    tail: Tail,
    others: [Child; 2],
    file: PathBuf,
    text: PathBuf,
}

impl PipedTail {
    /// Starts `tail` with these arguments, and waits until it reads.
    #[track_caller]
    pub fn start(lab: &Lab, arguments: &[&str]) -> Self {
        let (file, text) = (lab.files().join("piped.pcapng"), lab.files().join("piped.txt"));
        let (tail, from_tail) = Tail::piped(lab, arguments);
        let (from_tee, to_tcpdump) = io::pipe().unwrap();
        // The file exists before `tee` creates it.
        File::create(&file).unwrap();
        let tee = Command::new("tee").arg(&file).stdin(from_tail).stdout(to_tcpdump).spawn().unwrap();
        let mut tcpdump = Command::new("tcpdump");
        tcpdump.args(["-nq", "-Z", "root", "-r", "-"]).stdin(from_tee).stdout(File::create(&text).unwrap());
        // tcpdump prints the name of the file that it reads.
        let tcpdump = tcpdump.stderr(Stdio::null()).spawn().unwrap();
        Self { tail, others: [tee, tcpdump], file, text }
    }

    /// The packets so far.
    #[track_caller]
    pub fn file(&self) -> PacketFile {
        PacketFile::read(&self.file)
    }

    /// Ends `tail` as Ctrl-C does. All three must exit with 0. Returns the packets, and tcpdump's text for them.
    #[track_caller]
    pub fn stop(self) -> (PacketFile, String) {
        let Self { tail, others, file, text } = self;
        tail.interrupt();
        let exit = tail.exit();
        assert_eq!(exit.code, Some(0), "{exit:?}");
        for mut other in others {
            assert!(other.wait().unwrap().success(), "{other:?}");
        }
        (PacketFile::read(&file), fs::read_to_string(text).unwrap())
    }
}

/// A packet in a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FilePacket {
    /// The name of its interface.
    pub interface: String,
    /// `ingress` or `egress`, seen from the pod.
    pub direction: &'static str,
    /// Its time in ns since the epoch.
    pub time_ns: u64,
    /// Bytes and length.
    pub frame: Captured,
}

/// The parts of a pcapng file that stories check.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PacketFile {
    /// The names of its interfaces.
    pub interfaces: Vec<String>,
    /// The descriptions of its interfaces.
    pub descriptions: Vec<String>,
    /// The hardware of its interfaces.
    pub hardware: Vec<String>,
    /// Its packets in order.
    pub packets: Vec<FilePacket>,
    /// For each interface with statistics: packets received, and dropped.
    pub statistics: Vec<(u64, u64)>,
    /// For each interface with statistics: packets that a rate or a budget has not let through.
    pub limited: Vec<u64>,
    /// Addresses and their names, in order.
    pub names: Vec<(IpAddr, String)>,
    /// The comments of blocks with names.
    pub comments: Vec<String>,
}

impl PacketFile {
    /// Reads a file. It can end in the middle of a block.
    #[track_caller]
    pub fn read(path: &Path) -> Self {
        Self::parse(&fs::read(path).unwrap())
    }

    /// Reads a file that ends with a whole block.
    #[track_caller]
    pub fn whole(path: &Path) -> Self {
        let bytes = fs::read(path).unwrap();
        let mut rest = &bytes[..];
        while !rest.is_empty() {
            let length = u32::from_le_bytes(rest[4..8].try_into().unwrap()) as usize;
            let (block, after) = rest.split_at(length);
            assert_eq!(block[4..8], block[length - 4..], "the length of a block");
            rest = after;
        }
        Self::parse(&bytes)
    }

    /// Parses the bytes of a file. They can end in the middle of a block.
    pub fn parse(bytes: &[u8]) -> Self {
        let u32_at =
            |at: usize| bytes.get(at..at + 4).map(|word| u32::from_le_bytes(word.try_into().unwrap()));
        let mut file = Self::default();
        let mut at = 0;
        while let (Some(kind), Some(length)) = (u32_at(at), u32_at(at + 4)) {
            let Some(block) = bytes.get(at + 8..at + length as usize - 4) else { break };
            match kind {
                1 => {
                    let text = |code| {
                        option(&block[8..], code).map(|text| String::from_utf8(text.to_vec()).unwrap())
                    };
                    file.interfaces.push(text(2).unwrap());
                    file.descriptions.push(text(3).unwrap_or_default());
                    file.hardware.push(text(15).unwrap_or_default());
                }
                5 => {
                    let count = |code| u64_of(option(&block[12..], code).unwrap());
                    file.statistics.push((count(4), count(5)));
                    file.limited.push(count(7));
                }
                4 => file.add_names(block),
                6 => file.packets.push(file.packet(block)),
                _ => assert_eq!(kind, 0x0a0d_0d0a, "a block of another kind"),
            }
            at += length as usize;
        }
        file
    }

    /// Adds the records of a block, up to the one of kind 0, and its comment.
    fn add_names(&mut self, mut block: &[u8]) {
        loop {
            let (head, rest) = block.split_at(4);
            let [kind, length] = [0, 2].map(|at| usize::from(u16::from_le_bytes([head[at], head[at + 1]])));
            let record = &rest[..length];
            block = &rest[length.next_multiple_of(4)..];
            let (address, name): (IpAddr, _) = match kind {
                0 => break,
                1 => (<[u8; 4]>::try_from(&record[..4]).unwrap().into(), &record[4..]),
                2 => (<[u8; 16]>::try_from(&record[..16]).unwrap().into(), &record[16..]),
                kind => panic!("a record of kind {kind}"),
            };
            let name = name.strip_suffix(&[0]).unwrap();
            self.names.push((address, String::from_utf8(name.to_vec()).unwrap()));
        }
        self.comments.extend(option(block, 1).map(|text| String::from_utf8(text.to_vec()).unwrap()));
    }

    fn packet(&self, block: &[u8]) -> FilePacket {
        let word = |at: usize| u32::from_le_bytes(block[at..at + 4].try_into().unwrap());
        let captured = word(12) as usize;
        let flags = option(&block[20 + captured.next_multiple_of(4)..], 2).unwrap();
        FilePacket {
            interface: self.interfaces[word(0) as usize].clone(),
            direction: if flags[0] & 3 == 1 { "ingress" } else { "egress" },
            time_ns: u64::from(word(4)) << 32 | u64::from(word(8)),
            frame: Captured { bytes: block[20..20 + captured].to_vec(), length: word(16) as usize },
        }
    }

    /// The frames of a direction.
    pub fn frames(&self, direction: &str) -> Frames {
        let packets = self.packets.iter().filter(|packet| packet.direction == direction);
        packets.fold(Frames::default(), |frames, packet| frames.with(&packet.frame.bytes, 1))
    }

    /// The frames of both directions.
    pub fn all_frames(&self) -> Frames {
        self.frames("ingress").and(&self.frames("egress"))
    }
}

/// The value of an option.
fn option(mut options: &[u8], code: u16) -> Option<&[u8]> {
    loop {
        let (head, rest) = options.split_at_checked(4)?;
        let number = |at: usize| u16::from_le_bytes([head[at], head[at + 1]]);
        let length = usize::from(number(2));
        if number(0) == code {
            return rest.get(..length);
        }
        options = rest.get(length.next_multiple_of(4)..)?;
    }
}

fn u64_of(bytes: &[u8]) -> u64 {
    u64::from_le_bytes(bytes.try_into().unwrap())
}
