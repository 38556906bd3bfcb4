//! The server of the API of packets, behind kube-apiserver.
//!
//! ```text
//! kubectl ─► kube-apiserver ─► query   what is requested, and what kube-apiserver has to authorise for it
//!                              limits  places for requests, and the rate of each
//! ```

pub mod limits;
pub mod query;
