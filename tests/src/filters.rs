//! Random filters, and random frames that have what the filters ask for.

mod arithmetic;
mod expressions;
mod frames;

pub use self::{expressions::expression, frames::frame};
