//! Compiles an expression with libpcap and with podmirror's compiler, and compares the results of the programs.

use std::{
    ffi::{CStr, CString, c_char, c_int, c_uint, c_void},
    sync::OnceLock,
};

use libloading::Library;
use mirror_core::filter::{FilterError, Program, classic::Instruction, compile};

const DLT_EN10MB: c_int = 1;
/// With this mask, `ip broadcast` matches the addresses with all bits one or all bits zero.
const NO_NETMASK: c_uint = 0;

/// `struct bpf_program`.
#[repr(C)]
struct BpfProgram {
    length: c_uint,
    instructions: *mut Instruction,
}

/// `struct pcap_pkthdr`.
#[repr(C)]
struct PacketHeader {
    seconds: libc::time_t,
    microseconds: libc::suseconds_t,
    captured: u32,
    length: u32,
}

type Compile = unsafe extern "C" fn(*mut c_void, *mut BpfProgram, *const c_char, c_int, c_uint) -> c_int;

struct Libpcap {
    open_dead: unsafe extern "C" fn(c_int, c_int) -> *mut c_void,
    close: unsafe extern "C" fn(*mut c_void),
    compile: Compile,
    error: unsafe extern "C" fn(*mut c_void) -> *const c_char,
    free_program: unsafe extern "C" fn(*mut BpfProgram),
    filter: unsafe extern "C" fn(*const BpfProgram, *const PacketHeader, *const u8) -> c_int,
}

fn libpcap() -> &'static Libpcap {
    static LIBRARY: OnceLock<Libpcap> = OnceLock::new();
    LIBRARY.get_or_init(|| {
        // SAFETY: libpcap runs no code when it is loaded.
        let open = |name| unsafe { Library::new(name) };
        let library =
            ["libpcap.so.0.8", "libpcap.so.1", "libpcap.so"].into_iter().find_map(|name| open(name).ok());
        let library: &'static Library =
            Box::leak(Box::new(library.expect("libpcap is missing: install tcpdump")));
        // SAFETY: the types are those of pcap(3pcap), and the library is never unloaded.
        unsafe {
            Libpcap {
                open_dead: *library.get(b"pcap_open_dead\0").unwrap(),
                close: *library.get(b"pcap_close\0").unwrap(),
                compile: *library.get(b"pcap_compile\0").unwrap(),
                error: *library.get(b"pcap_geterr\0").unwrap(),
                free_program: *library.get(b"pcap_freecode\0").unwrap(),
                filter: *library.get(b"pcap_offline_filter\0").unwrap(),
            }
        }
    })
}

/// A filter that libpcap has compiled.
pub(crate) struct Theirs(BpfProgram);

impl Theirs {
    /// Compiles `text`. The error is libpcap's message.
    pub(crate) fn compile(text: &str, optimise: bool) -> Result<Self, String> {
        let library = libpcap();
        let text = CString::new(text).unwrap();
        let mut program = BpfProgram { length: 0, instructions: std::ptr::null_mut() };
        // SAFETY: the handle is open until the end of the block, text and program are valid.
        unsafe {
            let handle = (library.open_dead)(DLT_EN10MB, 262_144);
            assert!(!handle.is_null(), "libpcap does not open a handle");
            let code = (library.compile)(handle, &mut program, text.as_ptr(), optimise.into(), NO_NETMASK);
            let compiled = match code {
                0 => Ok(Self(program)),
                _ => Err(CStr::from_ptr((library.error)(handle)).to_string_lossy().into_owned()),
            };
            (library.close)(handle);
            compiled
        }
    }

    pub(crate) fn instructions(&self) -> Vec<Instruction> {
        // SAFETY: libpcap has allocated this number of instructions, and `Instruction` has their layout.
        unsafe { std::slice::from_raw_parts(self.0.instructions, self.0.length as usize) }.to_vec()
    }

    /// Whether libpcap's program accepts the frame.
    pub(crate) fn matches(&self, frame: &[u8]) -> bool {
        self.matches_cut(frame, frame.len())
    }

    /// Whether libpcap's program accepts a frame if only its first `captured` bytes are present.
    pub(crate) fn matches_cut(&self, frame: &[u8], captured: usize) -> bool {
        let (captured, length) = (captured.try_into().unwrap(), frame.len().try_into().unwrap());
        let header = PacketHeader { seconds: 0, microseconds: 0, captured, length };
        // SAFETY: the program is libpcap's own, and the header describes the frame.
        unsafe { (libpcap().filter)(&self.0, &header, frame.as_ptr()) != 0 }
    }
}

impl Drop for Theirs {
    fn drop(&mut self) {
        // SAFETY: libpcap has allocated the program, and it is no longer used.
        unsafe { (libpcap().free_program)(&mut self.0) }
    }
}

/// One expression, compiled once by podmirror and twice by libpcap.
pub(crate) struct Pair {
    text: String,
    ours: Program,
    plain: Theirs,
    /// `None`: libpcap has found that no packet can match.
    optimised: Option<Theirs>,
}

impl Pair {
    /// Compiles `text` with both. Returns an error if podmirror's compiler refuses it. Panics if only libpcap refuses
    /// it.
    pub(crate) fn compile(text: &str) -> Result<Self, FilterError> {
        let ours = compile(text)?;
        let theirs = |optimise| match Theirs::compile(text, optimise) {
            Ok(theirs) => Some(theirs),
            Err(why) if optimise && why == "expression rejects all packets" => None,
            Err(why) => panic!("{text:?}: we take it, libpcap not: {why}"),
        };
        Ok(Self { text: text.to_owned(), ours, plain: theirs(false).unwrap(), optimised: theirs(true) })
    }

    /// The numbers of instructions of podmirror's program and of libpcap's, with its optimiser.
    pub(crate) fn instructions(&self) -> (usize, usize) {
        let theirs = self.optimised.as_ref().map_or(1, |optimised| optimised.instructions().len());
        (self.ours.instructions().len(), theirs)
    }

    /// The result of libpcap without its optimiser. Panics if podmirror's differs.
    #[track_caller]
    pub(crate) fn answer(&self, frame: &[u8]) -> bool {
        self.answer_of_cut(frame, frame.len())
    }

    /// Compares the results for the frame in a capture file that keeps `captured` bytes of each frame.
    #[track_caller]
    pub(crate) fn answer_of_cut(&self, frame: &[u8], captured: usize) -> bool {
        let Self { text, ours, plain, .. } = self;
        let len = frame.len().try_into().unwrap();
        let expected = plain.matches_cut(frame, captured);
        assert_eq!(
            ours.matches(&frame[..captured], len),
            expected,
            "libpcap says {expected} of {captured} bytes: ({text:?}, \"{}\")\n{}",
            hex(frame),
            ours.explain()
        );
        expected
    }

    /// Whether libpcap's result is the same with its optimiser.
    ///
    /// The optimiser removes and moves loads, so on a truncated frame its program can accept a frame that the
    /// expression rejects. libpcap 1.10.3 is also wrong about whole frames if an expression masks the same bits twice:
    /// it claims that no packet can match `net 2001:db8::/45 and 2001:db8::/45`.
    pub(crate) fn optimiser_agrees(&self, frame: &[u8]) -> bool {
        let answer = self.optimised.as_ref().is_some_and(|optimised| optimised.matches(frame));
        answer == self.plain.matches(frame)
    }
}

/// The bytes as hexadecimal text for `from_hex`.
pub(crate) fn hex(frame: &[u8]) -> String {
    frame.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// A frame from the text that a failed comparison has printed.
pub(crate) fn from_hex(text: &str) -> Vec<u8> {
    let digits: Vec<u32> = text.chars().map(|digit| digit.to_digit(16).unwrap()).collect();
    digits.chunks(2).map(|pair| (pair[0] << 4 | pair[1]) as u8).collect()
}
