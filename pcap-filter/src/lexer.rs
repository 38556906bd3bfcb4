//! Splits a filter into tokens, each with its byte range.
//!
//! As in libpcap's scanner the longest token wins, so that `80-90` is one token and `aa:bb:cc:dd:ee:ff` is an address.
//! The parser decides the meaning of a token, except for names of numbers such as `tcp-syn`.

use core::net::Ipv6Addr;
use std::ops::Range;

use super::{FilterError, names};

/// A token, with its byte range in the expression.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Token {
    pub(super) kind: TokenKind,
    pub(super) span: Range<usize>,
}

/// The kinds of tokens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum TokenKind {
    /// A number, or the name of a number (`tcpflags`).
    Number(u32),
    /// Two to four numbers with dots: an IPv4 address or network. `bits` results from how many numbers there are.
    Ipv4 { address: u32, bits: u32 },
    /// An IPv6 address.
    Ipv6(u128),
    /// An Ethernet address.
    Mac([u8; 6]),
    /// A word of letters: a keyword, or else a name.
    Word(String),
    /// A name that was written with a backslash, so that it is not read as a keyword.
    Name(String),
    /// An operator or a bracket, including `and`, `or` and `not`.
    Symbol(&'static str),
}

/// The operators, the longer ones first, with their internal names.
const SYMBOLS: &[(&str, &str)] = &[
    ("&&", "and"),
    ("||", "or"),
    (">=", ">="),
    ("<=", "<="),
    ("!=", "!="),
    ("==", "="),
    ("<<", "<<"),
    (">>", ">>"),
    ("!", "not"),
    ("=", "="),
    ("<", "<"),
    (">", ">"),
    ("(", "("),
    (")", ")"),
    ("[", "["),
    ("]", "]"),
    (":", ":"),
    ("/", "/"),
    ("&", "&"),
    ("|", "|"),
    ("^", "^"),
    ("+", "+"),
    ("-", "-"),
    ("*", "*"),
    ("%", "%"),
];

/// Splits an expression into tokens.
pub(super) fn tokens(text: &str) -> Result<Vec<Token>, FilterError> {
    let mut tokens = Vec::new();
    let mut at = 0;
    while let Some(rest) = text.get(at..).filter(|rest| !rest.is_empty()) {
        if rest.starts_with([' ', '\t', '\r', '\n']) {
            at += 1;
            continue;
        }
        let (kind, length) = first(rest).map_err(|(length, reason)| {
            let part = rest.get(..length).unwrap_or(rest);
            FilterError { position: at, part: part.to_owned(), reason }
        })?;
        tokens.push(Token { kind, span: at..at + length });
        at += length;
    }
    Ok(tokens)
}

type Scanned = Result<(TokenKind, usize), (usize, String)>;

/// The first token of `rest`, and its length in bytes.
fn first(rest: &str) -> Scanned {
    if let Some(name) = rest.strip_prefix('\\') {
        let end = name.find([' ', '!', '(', ')', '\n', '\t']).unwrap_or(name.len());
        if end > 0 {
            return Ok((TokenKind::Name(name[..end].to_owned()), end + 1));
        }
    }
    if let Some(found) = with_colons(rest) {
        return Ok(found);
    }
    let run = run_of(rest, |c| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.'));
    let word = run.trim_end_matches(['-', '_']);
    if word.starts_with(|c: char| c.is_ascii_alphanumeric()) {
        return Ok((classify(word).map_err(|reason| (word.len(), reason))?, word.len()));
    }
    for (symbol, name) in SYMBOLS {
        if rest.starts_with(symbol) {
            return Ok((TokenKind::Symbol(name), symbol.len()));
        }
    }
    let length = rest.chars().next().map_or(0, char::len_utf8);
    Err((length, "the filter language has no such character".to_owned()))
}

fn run_of(text: &str, belongs: impl Fn(char) -> bool) -> &str {
    text.split(|c| !belongs(c)).next().unwrap_or_default()
}

/// The longest IPv6 or Ethernet address at the beginning of `rest`, if there is one. The colon in `ip6[6:1]` is not
/// part of an address.
fn with_colons(rest: &str) -> Option<(TokenKind, usize)> {
    let run = run_of(rest, |c| c.is_ascii_hexdigit() || matches!(c, ':' | '.'));
    if !run.contains(':') {
        return None;
    }
    (2..=run.len()).rev().find_map(|end| {
        let text = run.get(..end)?;
        let kind = match text.parse::<Ipv6Addr>() {
            Ok(address) => TokenKind::Ipv6(address.to_bits()),
            Err(_) => TokenKind::Mac(mac(text, ':')?),
        };
        Some((kind, end))
    })
}

/// The kind of a token without colons.
fn classify(word: &str) -> Result<TokenKind, String> {
    if let Some(address) = mac(word, '-').or_else(|| mac(word, '.')).or_else(|| mac_of_digits(word)) {
        return Ok(TokenKind::Mac(address));
    }
    if let Some(number) = number(word) {
        return number.map(TokenKind::Number);
    }
    if word.split('.').count() > 1 && word.split('.').all(|part| !part.is_empty() && is_decimal(part)) {
        return ipv4(word);
    }
    Ok(match word {
        "and" => TokenKind::Symbol("and"),
        "or" => TokenKind::Symbol("or"),
        "not" => TokenKind::Symbol("not"),
        _ => match names::number(word) {
            Some(value) => TokenKind::Number(value),
            None => TokenKind::Word(word.to_owned()),
        },
    })
}

fn is_decimal(text: &str) -> bool {
    text.bytes().all(|byte| byte.is_ascii_digit())
}

/// Parses a number as in C: decimal, octal after a zero, hexadecimal after `0x`. `None`: the word is no number.
fn number(word: &str) -> Option<Result<u32, String>> {
    let hexadecimal = word.strip_prefix("0x").or_else(|| word.strip_prefix("0X"));
    let (digits, radix) = match (hexadecimal, word.strip_prefix('0')) {
        (Some(digits), _) if !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_hexdigit()) => {
            (digits, 16)
        }
        _ if !is_decimal(word) => return None,
        (_, Some(digits)) if !digits.is_empty() => (digits, 8),
        _ => (word, 10),
    };
    Some(u32::from_str_radix(digits, radix).map_err(|_| match radix {
        8 => "a number that begins with 0 is octal, and has 32 bits at most".to_owned(),
        _ => "a number has 32 bits at most".to_owned(),
    }))
}

/// Parses an IPv4 address, or its first two or three numbers.
fn ipv4(word: &str) -> Result<TokenKind, String> {
    let mut parts = Vec::new();
    for part in word.split('.') {
        let value = part.parse::<u8>();
        parts.push(value.map_err(|_| "each part of an IPv4 address is a number from 0 to 255".to_owned())?);
    }
    if parts.len() > 4 {
        return Err("an IPv4 address has four parts".to_owned());
    }
    let bits = 8 * parts.len() as u32;
    parts.resize(4, 0);
    let address = parts.iter().fold(0, |address, part| address << 8 | u32::from(*part));
    Ok(TokenKind::Ipv4 { address, bits })
}

/// Parses an Ethernet address of six parts, or of three with dots.
fn mac(text: &str, separator: char) -> Option<[u8; 6]> {
    let parts: Vec<&str> = text.split(separator).collect();
    let hexadecimal = |part: &&str| part.bytes().all(|byte| byte.is_ascii_hexdigit());
    if !parts.iter().all(hexadecimal) {
        return None;
    }
    match *parts.as_slice() {
        [a, b, c] if separator == '.' && [a, b, c].iter().all(|part| part.len() == 4) => {
            mac_of_digits(&[a, b, c].concat())
        }
        [_, _, _, _, _, _] => {
            let mut address = [0; 6];
            for (byte, part) in address.iter_mut().zip(parts) {
                *byte = u8::from_str_radix(part, 16).ok().filter(|_| part.len() <= 2)?;
            }
            Some(address)
        }
        _ => None,
    }
}

/// Parses an Ethernet address of twelve digits.
fn mac_of_digits(text: &str) -> Option<[u8; 6]> {
    if text.len() != 12 || !text.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        return None;
    }
    let number = u64::from_str_radix(text, 16).ok()?;
    let [_, _, address @ ..] = number.to_be_bytes();
    Some(address)
}
