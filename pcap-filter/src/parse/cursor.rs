//! Navigation of the parser through the tokens, and the positions of errors.

use super::{FilterError, MAX_DEPTH, Parsed, Parser, TokenKind};

impl Parser<'_> {
    pub(super) fn peek(&self) -> Option<&TokenKind> {
        self.peek_at(0)
    }

    pub(super) fn peek_at(&self, ahead: usize) -> Option<&TokenKind> {
        self.tokens.get(self.at + ahead).map(|token| &token.kind)
    }

    /// The next token, if it is an operator or a bracket.
    pub(super) fn symbol(&self) -> Option<&'static str> {
        self.symbol_at(0)
    }

    pub(super) fn symbol_at(&self, ahead: usize) -> Option<&'static str> {
        match self.peek_at(ahead) {
            Some(TokenKind::Symbol(symbol)) => Some(symbol),
            _ => None,
        }
    }

    pub(super) fn accept(&mut self, symbol: &str) -> bool {
        let found = self.symbol() == Some(symbol);
        self.at += usize::from(found);
        found
    }

    pub(super) fn accept_word(&mut self, expected: &str) -> bool {
        let found = matches!(self.peek(), Some(TokenKind::Word(word)) if word == expected);
        self.at += usize::from(found);
        found
    }

    pub(super) fn expect(&mut self, symbol: &str) -> Parsed<()> {
        if self.accept(symbol) { Ok(()) } else { Err(self.error(format!("expected '{symbol}'"))) }
    }

    /// Start of the next token.
    pub(super) fn start(&self) -> usize {
        self.tokens.get(self.at).map_or(self.text.len(), |token| token.span.start)
    }

    /// End of the last token.
    pub(super) fn end(&self) -> usize {
        self.at.checked_sub(1).and_then(|last| self.tokens.get(last)).map_or(0, |token| token.span.end)
    }

    /// An error at the next token.
    pub(super) fn error(&self, reason: impl Into<String>) -> FilterError {
        let span = self.tokens.get(self.at).map(|token| token.span.clone());
        FilterError::at(self.text, span.unwrap_or(self.text.len()..self.text.len()), reason)
    }

    /// An error in the tokens from `start` to here.
    pub(super) fn since(&self, start: usize, reason: impl Into<String>) -> FilterError {
        FilterError::at(self.text, start..self.end(), reason)
    }

    /// Returns to the previous position if `parse` fails.
    pub(super) fn attempt<T>(&mut self, parse: impl FnOnce(&mut Self) -> Parsed<T>) -> Parsed<T> {
        let (at, depth) = (self.at, self.depth);
        let parsed = parse(self);
        if parsed.is_err() {
            (self.at, self.depth) = (at, depth);
        }
        parsed
    }

    /// Parses one level deeper, up to a bound, so that recursion cannot exhaust the stack.
    pub(super) fn nested<T>(&mut self, parse: impl FnOnce(&mut Self) -> Parsed<T>) -> Parsed<T> {
        if self.depth == MAX_DEPTH {
            return Err(self.error("too many brackets and 'not's around each other"));
        }
        self.depth += 1;
        let parsed = parse(self);
        self.depth -= 1;
        parsed
    }
}
