//! Random filters, and random frames with values from the filters.

mod arithmetic;
mod expressions;
mod frames;

pub use self::{expressions::expression, frames::frame};
