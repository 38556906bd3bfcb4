//! Primitives that begin with their own keyword, such as `less 64`, `vlan 100` and `llc rnr`.

use super::{
    super::ast::{Arithmetic, Encapsulation, Llc, Primitive, Protocol, Relation},
    Parsed, Parser, TokenKind,
};

impl Parser<'_> {
    /// Parses the primitive that begins with the next word, which is `word`. `protocol`: the protocol just before it.
    /// `None`: the word begins something else.
    pub(super) fn other(&mut self, word: &str, protocol: Option<Protocol>) -> Parsed<Option<Primitive>> {
        match (word, protocol) {
            ("broadcast", _) => self.at += 1,
            ("multicast", _) => self.at += 1,
            (_, Some(_)) | ("len" | "length", None) => return Ok(None),
            (
                "less" | "greater" | "byte" | "vlan" | "mpls" | "pppoed" | "pppoes" | "geneve" | "llc",
                None,
            ) => {
                self.at += 1;
            }
            (_, None) => return Err(self.error("expected a keyword, such as tcp, host or port")),
        }
        Ok(Some(match word {
            "broadcast" => Primitive::Broadcast(protocol),
            "multicast" => Primitive::Multicast(protocol),
            "less" => self.length(Relation::LessOrEqual)?,
            "greater" => self.length(Relation::GreaterOrEqual)?,
            "byte" => self.byte()?,
            "vlan" => self.encapsulation(Encapsulation::Vlan)?,
            "mpls" => self.encapsulation(Encapsulation::Mpls)?,
            "pppoes" => self.encapsulation(Encapsulation::PppoeSession)?,
            "geneve" => self.encapsulation(Encapsulation::Geneve)?,
            "pppoed" => Primitive::PppoeDiscovery,
            _ => self.llc()?,
        }))
    }

    fn length(&mut self, relation: Relation) -> Parsed<Primitive> {
        let number = self.number("expected a number of bytes")?;
        Ok(Primitive::Relation(Arithmetic::Length, relation, Arithmetic::Number(number)))
    }

    /// Parses `byte 12 = 8`: a byte of the frame.
    fn byte(&mut self) -> Parsed<Primitive> {
        let index = Box::new(Arithmetic::Number(self.number("expected the place of a byte")?));
        let relation = match self.symbol() {
            Some("=") => Relation::Equal,
            Some("<") => Relation::Less,
            Some(">") => Relation::Greater,
            // libpcap compiles these two operators incorrectly: it forgets to load the byte.
            Some("&" | "|") => {
                return Err(self.error("not supported after byte; write it as in ether[0] & 1 != 0"));
            }
            _ => return Err(self.error("expected =, < or >")),
        };
        self.at += 1;
        let value = self.number("expected a number")?;
        let byte = Arithmetic::Field { protocol: Protocol::Ether, index, size: 1 };
        Ok(Primitive::Relation(byte, relation, Arithmetic::Number(value)))
    }

    /// Parses the number of a header, if there is one. It can be in brackets.
    fn encapsulation(&mut self, encapsulation: Encapsulation) -> Parsed<Primitive> {
        let brackets = (0..).take_while(|ahead| self.symbol_at(*ahead) == Some("(")).count();
        let Some(&TokenKind::Number(number)) = self.peek_at(brackets) else {
            return Ok(Primitive::Encapsulation(encapsulation, None));
        };
        self.at += brackets + 1;
        for _ in 0..brackets {
            self.expect(")")?;
        }
        Ok(Primitive::Encapsulation(encapsulation, Some(number)))
    }

    /// Parses the frames of `llc`: the next word is a format (I, S, U) or a command.
    fn llc(&mut self) -> Parsed<Primitive> {
        const FORMAT: u32 = 0x03;
        const SUPERVISORY: u32 = 0x0f;
        const UNNUMBERED: u32 = 0xef;
        let name = match self.peek() {
            Some(TokenKind::Word(word)) if word == "rnr" || super::keyword(word).is_none() => word.clone(),
            Some(TokenKind::Name(name)) => name.clone(),
            _ => return Ok(Primitive::Llc(Llc::Any)),
        };
        let (mask, bits) = match name.as_str() {
            "i" | "I" => (0x01, 0),
            "s" | "S" => (FORMAT, 1),
            "u" | "U" => (FORMAT, 3),
            "rr" => (SUPERVISORY, 0x01),
            "rnr" => (SUPERVISORY, 0x05),
            "rej" => (SUPERVISORY, 0x09),
            "ui" => (UNNUMBERED, 0x03),
            "ua" => (UNNUMBERED, 0x63),
            "disc" => (UNNUMBERED, 0x43),
            "dm" => (UNNUMBERED, 0x0f),
            "sabme" => (UNNUMBERED, 0x6f),
            "test" => (UNNUMBERED, 0xe3),
            "xid" => (UNNUMBERED, 0xaf),
            "frmr" => (UNNUMBERED, 0x87),
            _ => return Err(self.error("this kind of LLC frame is not known")),
        };
        self.at += 1;
        Ok(Primitive::Llc(Llc::Control { mask, bits }))
    }

    fn number(&mut self, expected: &str) -> Parsed<u32> {
        let Some(&TokenKind::Number(number)) = self.peek() else {
            return Err(self.error(expected));
        };
        self.at += 1;
        Ok(number)
    }
}
