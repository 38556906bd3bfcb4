//! The grammar of the filter language: parses tokens to a tree.
//!
//! As in libpcap's grammar, `and` and `or` have the same precedence and associate to the left. After `and` or `or`,
//! an id without qualifiers takes the qualifiers of the previous id (`tcp port 80 or 443`), also across a group in
//! parentheses. A group can contain ids, an expression or arithmetic. The three are tried in turn, and the error of
//! the attempt that advanced farthest is reported.

mod arithmetic;
mod cursor;
mod keywords;
mod words;

use std::ops::Range;

use self::keywords::{Keyword, keyword};
use super::{
    FilterError,
    ast::{Direction, Expr, ExprKind, Id, Kind, Primitive, Qualifiers},
    lexer::{Token, TokenKind, tokens},
};

/// Maximum number of tokens in an expression, so that no text keeps the compiler busy.
const MAX_TOKENS: usize = 500;
/// Maximum nesting of brackets and `not`s.
const MAX_DEPTH: usize = 50;

type Parsed<T> = Result<T, FilterError>;

pub(super) fn parse(text: &str) -> Parsed<Expr> {
    let tokens = tokens(text)?;
    let mut parser = Parser { text, tokens, at: 0, depth: 0 };
    if parser.tokens.is_empty() {
        return Err(
            parser.error("there is nothing in this filter; leave it out where every packet is wanted")
        );
    }
    if let Some(token) = parser.tokens.get(MAX_TOKENS) {
        let span = token.span.clone();
        return Err(FilterError::at(text, span, format!("a filter has {MAX_TOKENS} words at most")));
    }
    let (expr, _) = parser.expression(None)?;
    match parser.peek() {
        None => Ok(expr),
        Some(_) => Err(parser.error("expected 'and', 'or' or the end")),
    }
}

struct Parser<'a> {
    text: &'a str,
    tokens: Vec<Token>,
    at: usize,
    depth: usize,
}

impl Parser<'_> {
    /// Parses an expression. `inherited`: the qualifiers before the bracket that contains it.
    fn expression(&mut self, inherited: Option<Qualifiers>) -> Parsed<(Expr, Option<Qualifiers>)> {
        let (mut left, mut qualifiers) = self.operand(inherited, false)?;
        loop {
            let kind = match self.symbol() {
                Some("and") => ExprKind::And,
                Some("or") => ExprKind::Or,
                _ => return Ok((left, qualifiers)),
            };
            self.at += 1;
            let (right, after) = self.operand(qualifiers, true)?;
            left = combine(kind, left, right);
            qualifiers = after;
        }
    }

    /// Parses a primitive, a group, or, after `and` and `or`, an id; each with any `not` before it. Also returns the
    /// qualifiers for an id that can follow.
    fn operand(
        &mut self,
        inherited: Option<Qualifiers>,
        after_operator: bool,
    ) -> Parsed<(Expr, Option<Qualifiers>)> {
        let start = self.start();
        if self.accept("not") {
            let (inner, after) = self.nested(|parser| parser.operand(inherited, after_operator))?;
            return Ok((negate(inner, start), after));
        }
        if self.symbol() != Some("(") {
            if after_operator && self.is_id() {
                return Ok((self.id(inherited)?, inherited));
            }
            return self.primitive();
        }
        let relation = match self.attempt(Self::relation) {
            Ok(expr) => return Ok((expr, None)),
            Err(error) => error,
        };
        let ids = if after_operator {
            match self.attempt(|parser| parser.id(inherited)) {
                Ok(expr) => return Ok((expr, inherited)),
                Err(error) => error,
            }
        } else {
            relation.clone()
        };
        self.at += 1;
        let group = self.nested(|parser| {
            let (mut inner, _) = parser.expression(inherited)?;
            parser.expect(")")?;
            inner.span = start..parser.end();
            Ok((inner, inherited))
        });
        // Report the error of the attempt that advanced farthest.
        group.map_err(|error| [relation, ids].into_iter().fold(error, FilterError::or_farther))
    }

    /// Parses an id, or a group of ids, all with the same qualifiers.
    fn id(&mut self, qualifiers: Option<Qualifiers>) -> Parsed<Expr> {
        let start = self.start();
        if self.accept("not") {
            return Ok(negate(self.nested(|parser| parser.id(qualifiers))?, start));
        }
        if self.accept("(") {
            return self.nested(|parser| {
                let mut group = parser.id(qualifiers)?;
                loop {
                    let kind = match parser.symbol() {
                        Some("and") => ExprKind::And,
                        Some("or") => ExprKind::Or,
                        _ => break,
                    };
                    parser.at += 1;
                    group = combine(kind, group, parser.id(qualifiers)?);
                }
                parser.expect(")")?;
                group.span = start..parser.end();
                Ok(group)
            });
        }
        if let Some(TokenKind::Word(word)) = self.peek()
            && keyword(word).is_some()
        {
            return Err(self.error(format!("this is a keyword; as a name, write it \\{word}")));
        }
        let Some(qualifiers) = qualifiers else {
            return Err(self.error("nothing tells what this is: put host, net, port or proto before it"));
        };
        let id = self.single_id()?;
        Ok(primitive(Primitive::Id(qualifiers, id), start..self.end()))
    }

    fn single_id(&mut self) -> Parsed<Id> {
        let start = self.start();
        let Some(kind) = self.peek().cloned() else {
            return Err(self.error("expected an address, a number or a name"));
        };
        self.at += 1;
        Ok(match kind {
            TokenKind::Number(number) => Id::Number(number),
            TokenKind::Mac(address) => Id::Mac(address),
            TokenKind::Ipv6(address) => {
                let prefix = self.prefix_length(128)?.unwrap_or(128);
                if prefix < 128 && address << prefix != 0 {
                    return Err(self.since(start, "the address has bits behind the prefix"));
                }
                Id::Ipv6 { address, prefix }
            }
            TokenKind::Ipv4 { address, bits } => {
                let mask = if self.accept_word("mask") {
                    let Some(&TokenKind::Ipv4 { address: mask, .. }) = self.peek() else {
                        return Err(self.error("expected a mask such as 255.255.0.0"));
                    };
                    self.at += 1;
                    mask
                } else if let Some(length) = self.prefix_length(32)? {
                    u32::MAX.checked_shl(32 - length).unwrap_or(0)
                } else {
                    return Ok(Id::Ipv4 { address, bits });
                };
                if address & !mask != 0 {
                    return Err(self.since(start, "the address has bits behind the mask"));
                }
                Id::Ipv4Net { address, mask }
            }
            TokenKind::Name(name) | TokenKind::Word(name) => Id::Name(name),
            TokenKind::Symbol(_) => {
                self.at -= 1;
                return Err(self.error("expected an address, a number or a name"));
            }
        })
    }

    fn prefix_length(&mut self, most: u32) -> Parsed<Option<u32>> {
        if !self.accept("/") {
            return Ok(None);
        }
        match self.peek() {
            Some(&TokenKind::Number(length)) if length <= most => {
                self.at += 1;
                Ok(Some(length))
            }
            _ => Err(self.error(format!("expected a prefix length from 0 to {most}"))),
        }
    }

    /// Parses a primitive with its own keyword, and returns the qualifiers for the ids after it.
    fn primitive(&mut self) -> Parsed<(Expr, Option<Qualifiers>)> {
        let start = self.start();
        let found = match self.peek().cloned() {
            None => return Err(self.error("expected more")),
            Some(TokenKind::Number(_)) | Some(TokenKind::Symbol("-")) => None,
            Some(TokenKind::Word(word)) => match keyword(&word) {
                Some(Keyword::Unsupported(reason)) => return Err(self.error(reason)),
                Some(Keyword::Other) => self.other(&word, None)?,
                Some(Keyword::Protocol(_)) if self.symbol_at(1) == Some("[") => None,
                Some(_) => return self.qualified(start),
                None => return Err(self.error("expected a keyword, such as tcp, host or port")),
            },
            Some(TokenKind::Symbol(_)) => {
                return Err(self.error("expected a keyword, such as tcp, host or port"));
            }
            Some(_) => return Err(self.error("nothing tells what this is: put host, net or such before it")),
        };
        let expr = match found {
            Some(found) => primitive(found, start..self.end()),
            None => self.relation()?,
        };
        Ok((expr, None))
    }

    /// Parses a primitive that begins with a protocol, a direction or a kind.
    fn qualified(&mut self, start: usize) -> Parsed<(Expr, Option<Qualifiers>)> {
        let protocol = self.keyword_of(|keyword| match keyword {
            Keyword::Protocol(protocol) => Some(protocol),
            _ => None,
        });
        if let (Some(_), Some(TokenKind::Word(word))) = (protocol, self.peek().cloned())
            && let Some(found) = self.other(&word, protocol)?
        {
            return Ok((primitive(found, start..self.end()), None));
        }
        let direction = self.direction();
        let kind = self.keyword_of(|keyword| match keyword {
            Keyword::Kind(Kind::Proto | Kind::ProtoChain) if direction.is_some() => None,
            Keyword::Kind(kind) => Some(kind),
            _ => None,
        });
        if let (Some(protocol), None, None) = (protocol, direction, kind) {
            return Ok((primitive(Primitive::Protocol(protocol), start..self.end()), None));
        }
        let qualifiers = Qualifiers {
            protocol,
            direction: direction.unwrap_or(Direction::Either),
            kind: kind.unwrap_or(Kind::Host),
        };
        let mut expr = self.id(Some(qualifiers))?;
        expr.span.start = start;
        Ok((expr, Some(qualifiers)))
    }

    /// Parses `src`, `dst`, and combinations of them.
    fn direction(&mut self) -> Option<Direction> {
        let first = self.keyword_of(|keyword| match keyword {
            Keyword::Direction(direction) => Some(direction),
            _ => None,
        })?;
        let other = if first == Direction::Src { "dst" } else { "src" };
        let both = match self.symbol() {
            Some("or") => Direction::SrcOrDst,
            Some("and") => Direction::SrcAndDst,
            _ => return Some(first),
        };
        self.at += 1;
        if self.accept_word(other) {
            return Some(both);
        }
        self.at -= 1;
        Some(first)
    }

    /// Takes the next word if `choose` accepts it.
    fn keyword_of<T>(&mut self, choose: impl FnOnce(Keyword) -> Option<T>) -> Option<T> {
        let Some(TokenKind::Word(word)) = self.peek() else { return None };
        let chosen = choose(keyword(word)?)?;
        self.at += 1;
        Some(chosen)
    }

    /// Whether the next token is an id. A number that is part of arithmetic is not.
    fn is_id(&self) -> bool {
        match self.peek() {
            Some(TokenKind::Number(_)) => {
                self.symbol_at(1).is_none_or(|next| matches!(next, "and" | "or" | ")"))
            }
            Some(TokenKind::Word(word)) => keyword(word).is_none(),
            Some(TokenKind::Symbol(_)) | None => false,
            Some(_) => true,
        }
    }
}

fn primitive(primitive: Primitive, span: Range<usize>) -> Expr {
    Expr { kind: ExprKind::Primitive(primitive), span }
}

fn combine(kind: fn(Box<Expr>, Box<Expr>) -> ExprKind, left: Expr, right: Expr) -> Expr {
    let span = left.span.start..right.span.end;
    Expr { kind: kind(Box::new(left), Box::new(right)), span }
}

fn negate(inner: Expr, start: usize) -> Expr {
    let span = start..inner.span.end;
    Expr { kind: ExprKind::Not(Box::new(inner)), span }
}
