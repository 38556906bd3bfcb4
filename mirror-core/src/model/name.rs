//! Names of mirrors and targets.
//!
//! A user's name is a DNS label, so it can be the suffix of an annotation key, the value of a metric's label and the
//! name of an object.

use std::{fmt, str::FromStr};

/// Prefix of the name of a capture.
const CAPTURE: &str = "capture.";
/// Prefixes of the names of mirrors that come from a `Mirror` or a `ClusterMirror`, as kubectl writes them.
const RESOURCES: [&str; 2] = ["mirror/", "clustermirror/"];

/// A DNS label (RFC 1123): 1 to 63 lower-case letters, digits and `-`, with a letter or digit at both ends.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Name(String);

impl Name {
    /// The name of a mirror or target that the user did not name.
    pub const DEFAULT: &str = "default";
    /// Maximum length of a name in bytes.
    pub const MAX_BYTES: usize = 63;

    /// The name of the mirror and the target of a capture. It contains a dot, so no user can choose it.
    pub fn of_capture(number: u32) -> Self {
        Self(format!("{CAPTURE}{number}"))
    }

    /// Whether this is the name of a capture.
    pub fn is_capture(&self) -> bool {
        self.0.starts_with(CAPTURE)
    }

    /// The number of the capture with this name.
    pub fn capture_number(&self) -> Option<u32> {
        self.0.strip_prefix(CAPTURE)?.parse().ok()
    }

    /// The name of the mirror of a `Mirror`. It contains a slash, so no annotation can choose it.
    pub fn of_mirror(name: &Self) -> Self {
        Self(format!("{}{name}", RESOURCES[0]))
    }

    /// The name of the mirror of the `ClusterMirror` with this name.
    pub fn of_cluster_mirror(name: &Self) -> Self {
        Self(format!("{}{name}", RESOURCES[1]))
    }

    /// Whether this is the name of the mirror of a `ClusterMirror`.
    pub fn is_of_cluster_mirror(&self) -> bool {
        self.0.starts_with(RESOURCES[1])
    }

    /// Parses a name that an agent wrote: a user's name, or that of a capture or of the mirror of a resource.
    pub fn of_written(text: &str) -> Option<Self> {
        let is_capture = text.strip_prefix(CAPTURE).is_some_and(|number| number.parse::<u32>().is_ok());
        let of_resource = RESOURCES.into_iter().find_map(|kind| text.strip_prefix(kind));
        match of_resource.map_or(is_capture, |name| name.parse::<Self>().is_ok()) {
            true => Some(Self(text.to_owned())),
            false => text.parse().ok(),
        }
    }

    /// The text.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Whether this is [`Self::DEFAULT`].
    pub fn is_default(&self) -> bool {
        self.0 == Self::DEFAULT
    }
}

impl Default for Name {
    fn default() -> Self {
        Self(Self::DEFAULT.into())
    }
}

impl FromStr for Name {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let is_inner = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
        let ends = [text.bytes().next(), text.bytes().last()];
        let is_label = text.len() <= Self::MAX_BYTES
            && text.bytes().all(|byte| is_inner(byte) || byte == b'-')
            && ends.into_iter().all(|end| end.is_some_and(is_inner));
        if is_label {
            Ok(Self(text.to_owned()))
        } else {
            Err(format!(
                "{text:?} is not a name: use 1 to {} lower-case letters, digits and '-', as in ids-west",
                Self::MAX_BYTES
            ))
        }
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// The name of a mirror, unique among the mirrors of one pod or interface.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct MirrorId(pub Name);

impl fmt::Display for MirrorId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// The name of a target, unique on the node.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TargetName(pub Name);

impl fmt::Display for TargetName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use mirror_common::abi::MAX_MIRROR;

    use super::*;

    #[test]
    fn the_name_of_a_capture_can_be_read_back_and_cannot_be_typed() {
        let name = Name::of_capture(7);
        assert_eq!((name.capture_number(), Name::default().capture_number()), (Some(7), None));
        assert!(name.as_str().parse::<Name>().is_err());
        assert_eq!(Name::of_written(name.as_str()), Some(name));
        assert_eq!(Name::of_written("ids"), "ids".parse().ok());
        assert_eq!([Name::of_written("capture."), Name::of_written("capture.x")], [None, None]);
    }

    #[test]
    fn the_mirror_of_a_resource_has_a_name_that_nobody_else_can_give() {
        let long = "a".repeat(Name::MAX_BYTES);
        for text in ["ids", "capture", &long] {
            let name = text.parse().unwrap_or_default();
            let names = [Name::of_mirror(&name), Name::of_cluster_mirror(&name)];
            assert_ne!(names[0], names[1]);
            for name in names {
                assert!(name.as_str().len() <= MAX_MIRROR && !name.is_capture(), "{name}");
                assert!(name.as_str().parse::<Name>().is_err());
                assert_eq!(Name::of_written(name.as_str()), Some(name));
            }
        }
        for bad in ["mirror/", "mirror/A", "mirror/a/b", "other/a", &format!("mirror/{long}a")] {
            assert_eq!(Name::of_written(bad), None, "{bad}");
        }
    }

    #[test]
    fn a_name_is_a_dns_label() {
        let long = "a".repeat(63);
        for name in ["a", "9", "ids", "ids-west-2", &long] {
            assert_eq!(name.parse::<Name>().map(|name| name.to_string()), Ok(name.to_owned()));
        }
        for name in ["", "-ids", "ids-", "Ids", "i.ds", "i_ds", "i ds", "ïds", &format!("{long}a")] {
            let error = name.parse::<Name>().map_err(|error| error.contains(&format!("{name:?}")));
            assert_eq!(error, Err(true), "{name}");
        }
    }
}
