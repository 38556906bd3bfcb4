//! Relations such as `tcp[tcpflags] & (tcp-syn|tcp-ack) != 0`.
//!
//! Constants are computed here. Of the packet, one field can be masked and compared with a constant; a step of a
//! program cannot do more.

use super::{
    super::ast::{Expr, Primitive, Protocol, Relation, Value},
    Keyword, Parsed, Parser, TokenKind, keyword, primitive,
};

/// The operators, in the order in which they bind.
const LEVELS: &[&[&str]] = &[&["|"], &["&"], &["<<", ">>"], &["+", "-"], &["*", "/"]];

impl Parser<'_> {
    pub(super) fn relation(&mut self) -> Parsed<Expr> {
        let start = self.start();
        let left = self.arithmetic(0)?;
        let relation = match self.symbol() {
            Some(">") => Relation::Greater,
            Some(">=") => Relation::GreaterOrEqual,
            Some("=") => Relation::Equal,
            Some("!=") => Relation::NotEqual,
            Some("<=") => Relation::LessOrEqual,
            Some("<") => Relation::Less,
            Some("^" | "%") => return Err(self.error("this operator is not supported")),
            _ => return Err(self.error("expected a comparison: =, !=, >, >=, < or <=")),
        };
        self.at += 1;
        let right = self.arithmetic(0)?;
        let span = start..self.end();
        Ok(primitive(Primitive::Relation(left, relation, right), span))
    }

    fn arithmetic(&mut self, level: usize) -> Parsed<Value> {
        let Some(operators) = LEVELS.get(level) else { return self.nested(Self::value) };
        let start = self.start();
        let mut left = self.arithmetic(level + 1)?;
        while let Some(operator) = self.symbol().filter(|symbol| operators.contains(symbol)) {
            self.at += 1;
            let right = self.arithmetic(level + 1)?;
            left = computed(left, operator, right).map_err(|reason| self.since(start, reason))?;
        }
        Ok(left)
    }

    fn value(&mut self) -> Parsed<Value> {
        let start = self.start();
        if self.accept("-") {
            let value = self.nested(Self::value)?;
            return computed(Value::Constant(0), "-", value).map_err(|reason| self.since(start, reason));
        }
        if self.accept("(") {
            let value = self.arithmetic(0)?;
            self.expect(")")?;
            return Ok(value);
        }
        let value = match self.peek() {
            Some(&TokenKind::Number(number)) => Value::Constant(number),
            Some(TokenKind::Word(word)) if matches!(word.as_str(), "len" | "length") => {
                Value::Length { mask: u32::MAX }
            }
            Some(TokenKind::Word(word)) => match keyword(word) {
                Some(Keyword::Protocol(protocol)) if self.symbol_at(1) == Some("[") => {
                    return self.field(protocol);
                }
                _ => return Err(self.error("expected a number, len, or a field such as tcp[13]")),
            },
            _ => return Err(self.error("expected a number, len, or a field such as tcp[13]")),
        };
        self.at += 1;
        Ok(value)
    }

    /// `protocol[offset:size]`.
    fn field(&mut self, protocol: Protocol) -> Parsed<Value> {
        self.at += 2;
        let start = self.start();
        let Value::Constant(offset) = self.arithmetic(0)? else {
            return Err(self.since(start, "an offset that depends on the packet is not supported"));
        };
        let size = if self.accept(":") {
            match self.peek() {
                Some(&TokenKind::Number(size @ (1 | 2 | 4))) => {
                    self.at += 1;
                    size as u8
                }
                _ => return Err(self.error("a field has 1, 2 or 4 bytes")),
            }
        } else {
            1
        };
        self.expect("]")?;
        Ok(Value::Field { protocol, offset, size, mask: u32::MAX })
    }
}

fn computed(left: Value, operator: &str, right: Value) -> Result<Value, String> {
    Ok(match (left, operator, right) {
        (Value::Constant(left), _, Value::Constant(right)) => {
            Value::Constant(constant(left, operator, right)?)
        }
        (Value::Length { mask }, "&", Value::Constant(more))
        | (Value::Constant(more), "&", Value::Length { mask }) => Value::Length { mask: mask & more },
        (Value::Field { protocol, offset, size, mask }, "&", Value::Constant(more)) => {
            Value::Field { protocol, offset, size, mask: mask & more }
        }
        // Here libpcap forgets to look whether the packet has such a header.
        (Value::Constant(_), "&", Value::Field { .. }) => {
            return Err("the field comes before its mask, as in tcp[13] & 2".to_owned());
        }
        _ => {
            return Err(
                "arithmetic with what stands in the packet is not supported, except '& constant'".to_owned()
            );
        }
    })
}

/// As in classic BPF, numbers have 32 bits and wrap around.
fn constant(left: u32, operator: &str, right: u32) -> Result<u32, String> {
    Ok(match operator {
        "|" => left | right,
        "&" => left & right,
        "+" => left.wrapping_add(right),
        "-" => left.wrapping_sub(right),
        "*" => left.wrapping_mul(right),
        "<<" => left.checked_shl(right).ok_or("a shift by more than 31 bits")?,
        ">>" => left.checked_shr(right).ok_or("a shift by more than 31 bits")?,
        _ => left.checked_div(right).ok_or("a division by zero")?,
    })
}
