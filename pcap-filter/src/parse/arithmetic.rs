//! Relations such as `tcp[tcpflags] & (tcp-syn|tcp-ack) != 0`.
//!
//! Constant parts are evaluated here.

use super::{
    super::ast::{Arithmetic, Expr, Operator, Primitive, Protocol, Relation},
    Keyword, Parsed, Parser, TokenKind, keyword, primitive,
};

/// The operators with a precedence in libpcap's grammar, the lowest first.
const LEVELS: &[&[(&str, Operator)]] = &[
    &[("|", Operator::Or)],
    &[("&", Operator::And)],
    &[("<<", Operator::ShiftLeft), (">>", Operator::ShiftRight)],
    &[("+", Operator::Add), ("-", Operator::Subtract)],
    &[("*", Operator::Multiply), ("/", Operator::Divide)],
];
/// The operators without a precedence. Such an operator applies to the operand just before it and to everything after
/// it: `1 + 7 % 4 + 2` is `1 + (7 % (4 + 2))`.
const UNRANKED: &[(&str, Operator)] = &[("%", Operator::Remainder), ("^", Operator::Xor)];

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
            _ => return Err(self.error("expected a comparison: =, !=, >, >=, < or <=")),
        };
        self.at += 1;
        let right = self.arithmetic(0)?;
        let span = start..self.end();
        Ok(primitive(Primitive::Relation(left, relation, right), span))
    }

    fn arithmetic(&mut self, level: usize) -> Parsed<Arithmetic> {
        let Some(operators) = LEVELS.get(level) else { return self.nested(Self::with_unranked) };
        let start = self.start();
        let mut left = self.arithmetic(level + 1)?;
        while let Some(operator) = self.accept_operator(operators) {
            let right = self.arithmetic(level + 1)?;
            left = self.computed(start, operator, left, right)?;
        }
        Ok(left)
    }

    /// Parses a value, with an operator without a precedence.
    fn with_unranked(&mut self) -> Parsed<Arithmetic> {
        let start = self.start();
        let value = self.value()?;
        let Some(operator) = self.accept_operator(UNRANKED) else { return Ok(value) };
        let right = self.arithmetic(0)?;
        self.computed(start, operator, value, right)
    }

    fn accept_operator(&mut self, operators: &[(&str, Operator)]) -> Option<Operator> {
        let symbol = self.symbol()?;
        let (_, operator) = operators.iter().find(|(known, _)| *known == symbol)?;
        self.at += 1;
        Some(*operator)
    }

    fn value(&mut self) -> Parsed<Arithmetic> {
        if self.accept("-") {
            return Ok(match self.nested(Self::with_unranked)? {
                Arithmetic::Number(number) => Arithmetic::Number(number.wrapping_neg()),
                other => Arithmetic::Negated(Box::new(other)),
            });
        }
        if self.accept("(") {
            let value = self.arithmetic(0)?;
            self.expect(")")?;
            return Ok(value);
        }
        let value = match self.peek() {
            Some(&TokenKind::Number(number)) => Arithmetic::Number(number),
            Some(TokenKind::Word(word)) if matches!(word.as_str(), "len" | "length") => Arithmetic::Length,
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

    /// Parses `protocol[index:size]`.
    fn field(&mut self, protocol: Protocol) -> Parsed<Arithmetic> {
        self.at += 2;
        let index = Box::new(self.arithmetic(0)?);
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
        Ok(Arithmetic::Field { protocol, index, size })
    }

    fn computed(
        &self,
        start: usize,
        operator: Operator,
        left: Arithmetic,
        right: Arithmetic,
    ) -> Parsed<Arithmetic> {
        let shifts = matches!(operator, Operator::ShiftLeft | Operator::ShiftRight);
        let divides = matches!(operator, Operator::Divide | Operator::Remainder);
        match (&left, &right) {
            (_, Arithmetic::Number(32..)) if shifts => Err(self.since(start, "a shift by more than 31 bits")),
            (_, Arithmetic::Number(0)) if divides => Err(self.since(start, "a division by zero")),
            (Arithmetic::Number(one), Arithmetic::Number(other)) => {
                Ok(Arithmetic::Number(operator.apply(*one, *other).unwrap_or(0)))
            }
            _ => Ok(Arithmetic::Binary(operator, Box::new(left), Box::new(right))),
        }
    }
}
