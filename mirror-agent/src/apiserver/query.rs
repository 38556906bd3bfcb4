//! Reads the URIs of requests, strictly. Pure.
//!
//! kube-apiserver parses a URI, authorises the access that it finds there, and passes the URI on. If this module
//! parsed the URI differently, the server could serve packets that nobody has authorised. So this module accepts
//! only spellings that both parse alike. It returns a [`Scope`]: kube-apiserver authorises this access once more,
//! and the server serves exactly this access. The tests compare with a model of kube-apiserver's `requestinfo.go`,
//! for any URI.

use std::{borrow::Cow, collections::BTreeMap, time::Duration};

use http::{Method, Uri};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use mirror_api::{
    Direction, SettingsSpec, labels,
    packets::{GROUP, ReadOf, ReadRequest, VERSION},
};
use mirror_core::{
    destination::{device_name, is_subdomain},
    model::Name,
    settings::{parse_duration, parse_filter, parse_snaplen, show_kubernetes_duration},
};

/// Maximum length of a value in a URI, in bytes.
const MAX_VALUE: usize = 8 << 10;
/// Maximum length of a text of the client in a message, in bytes.
const MAX_SHOWN: usize = 80;
/// Maximum number of NICs, as in a Mirror.
const MAX_NICS: usize = 32;
/// Maximum age of packets of the past.
const MAX_SINCE: Duration = Duration::from_secs(24 * 3600);
/// Maximum time over which rates are measured.
const MAX_INTERVAL: Duration = Duration::from_secs(5);
/// The time in seconds after which a client can try again.
const AGAIN: u32 = 5;

/// A request that can be served.
#[derive(Debug, Clone, PartialEq)]
pub enum Query {
    /// Packets of pods, or of an interface of a node.
    Packets(Box<Packets>),
    /// Reports about pods.
    Reports(Reports),
    /// Something that everyone may read.
    Open(Open),
}

/// What everyone may read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Open {
    /// The groups of this server.
    Groups,
    /// The versions of the group.
    Versions,
    /// The resources of the version.
    Resources,
}

/// A request for packets.
#[derive(Debug, Clone, PartialEq)]
pub struct Packets {
    /// The access that it needs.
    pub scope: Scope,
    /// The request to each agent. The reader is empty.
    pub read: ReadRequest,
    /// The node of the interface. `None`: packets of pods, on any node.
    pub node: Option<String>,
    /// The time after which it ends.
    pub lasts: Option<Duration>,
}

/// A request for reports about pods.
#[derive(Debug, Clone, PartialEq)]
pub struct Reports {
    /// The access that it needs.
    pub scope: Scope,
    /// The labels of the pods. Empty: any.
    pub labels: LabelSelector,
    /// The time over which rates are measured. `None`: no rates.
    pub interval: Option<Duration>,
}

/// Access to objects of the group, as RBAC knows it. Only [`parse`] makes one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Scope {
    verb: &'static str,
    resource: &'static str,
    namespace: Option<String>,
    name: Option<String>,
}

impl Scope {
    /// The verb, the resource, the namespace and the name. An empty namespace or name: all, or none.
    pub fn attributes(&self) -> [&str; 4] {
        let [namespace, name] = [&self.namespace, &self.name].map(|text| text.as_deref().unwrap_or_default());
        [self.verb, self.resource, namespace, name]
    }

    /// Reads a path.
    fn at(segments: &[&str]) -> Option<Self> {
        let (namespace, resource, name) = match segments {
            ["", "apis", GROUP, VERSION, "namespaces", namespace, resource] => {
                (Some(*namespace), *resource, None)
            }
            ["", "apis", GROUP, VERSION, "namespaces", namespace, resource, name] => {
                (Some(*namespace), *resource, Some(*name))
            }
            ["", "apis", GROUP, VERSION, resource] => (None, *resource, None),
            _ => return None,
        };
        let (verb, resource) = match (resource, namespace, name) {
            ("packets", _, None) => ("watch", "packets"),
            ("nodepackets", None, None) => ("watch", "nodepackets"),
            ("podreports", _, None) => ("list", "podreports"),
            ("podreports", _, Some(_)) => ("get", "podreports"),
            _ => return None,
        };
        let is_valid =
            namespace.is_none_or(|text| text.parse::<Name>().is_ok()) && name.is_none_or(is_subdomain);
        let [namespace, name] = [namespace, name].map(|text| text.map(str::to_owned));
        is_valid.then_some(Self { verb, resource, namespace, name })
    }

    /// The parameters that a request can have. kubectl sends those of reports from `limit` on.
    fn parameters(&self) -> &'static str {
        match (self.resource, self.verb) {
            ("packets", _) => {
                "watch fieldSelector labelSelector filter snapLength direction superFrames nics since follow \
                 timeoutSeconds timeout"
            }
            ("nodepackets", _) => {
                "watch fieldSelector interface filter snapLength direction superFrames timeoutSeconds timeout"
            }
            (_, "list") => {
                "fieldSelector labelSelector interval watch limit resourceVersion includeObject timeout"
            }
            _ => "interval watch resourceVersion includeObject timeout",
        }
    }
}

/// A request that is not served, as a `Status` of the API says it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    /// The code of HTTP.
    pub code: u16,
    /// The reason in one word.
    pub reason: &'static str,
    /// The reason in a sentence.
    pub message: String,
    /// The parts of the request that cannot be served.
    pub causes: Vec<Cause>,
    /// The time in seconds after which the client can try again.
    pub retry: Option<u32>,
}

/// A part of a request that cannot be served.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cause {
    /// The reason in one word.
    pub reason: Cow<'static, str>,
    /// The parameter, or the pod as `NAMESPACE/NAME`.
    pub field: String,
    /// The reason in a sentence.
    pub message: String,
}

impl Refusal {
    /// A refusal of the whole request, for good.
    pub fn new(code: u16, reason: &'static str, message: impl Into<String>) -> Self {
        Self { code, reason, message: message.into(), causes: Vec::new(), retry: None }
    }

    /// A refusal of the whole request, for now.
    pub fn for_now(code: u16, reason: &'static str, message: impl Into<String>) -> Self {
        Self { retry: Some(AGAIN), ..Self::new(code, reason, message) }
    }

    /// A refusal for now, because another program does not answer.
    pub fn unavailable(message: impl Into<String>) -> Self {
        Self::for_now(503, "ServiceUnavailable", message)
    }

    /// A refusal because of a parameter.
    fn of(reason: &'static str, parameter: &str, value: &str, why: &str) -> Self {
        let field = start(parameter).to_owned();
        let message = format!("{field} {:?}: {why}", start(value));
        let refusal = Self::new(400, "BadRequest", message.clone());
        Self { causes: vec![Cause { reason: reason.into(), field, message }], ..refusal }
    }
}

/// Reads a request.
///
/// # Errors
///
/// A refusal that names the parameter and its value.
pub fn parse(method: &Method, uri: &Uri) -> Result<Query, Refusal> {
    if *method != Method::GET {
        return Err(Refusal::new(405, "MethodNotAllowed", "the only method is GET"));
    }
    let (path, query) = (uri.path(), uri.query().unwrap_or_default());
    let segments: Vec<_> = path.split('/').collect();
    let open = match segments.as_slice() {
        ["", "apis"] => Some(Open::Groups),
        ["", "apis", GROUP] => Some(Open::Versions),
        ["", "apis", GROUP, VERSION] => Some(Open::Resources),
        _ => None,
    };
    if let Some(open) = open {
        return Values::read(query, "timeout").map(|_| Query::Open(open));
    }
    let missing = || Refusal::new(404, "NotFound", format!("there is no path {:?}", start(path)));
    let mut scope = Scope::at(&segments).ok_or_else(missing)?;
    let values = Values::read(query, scope.parameters())?;
    scope.name = values.get("fieldSelector", only_name)?.or(scope.name);
    let labels = values.get("labelSelector", labels::parse)?.unwrap_or_default();
    if scope.verb == "watch" { packets(scope, labels, &values) } else { reports(scope, labels, &values) }
}

fn packets(scope: Scope, labels: LabelSelector, values: &Values) -> Result<Query, Refusal> {
    values.require("watch", |text| one_of(text, &[("true", ())]))?;
    let is_of_node = scope.resource == "nodepackets";
    let of = if is_of_node {
        values.require("fieldSelector", only_name)?;
        ReadOf::Interface(values.require("interface", device_name)?)
    } else {
        let nics = values.get("nics", |text| {
            let nics = text.split(',').map(device_name).collect::<Result<Vec<_>, _>>()?;
            let most = || format!("use at most {MAX_NICS} names");
            (nics.len() <= MAX_NICS).then_some(nics).ok_or_else(most)
        })?;
        ReadOf::Pods { namespace: scope.namespace.clone(), name: scope.name.clone(), labels, nics }
    };
    let directions =
        [("Both", Direction::Both), ("Ingress", Direction::Ingress), ("Egress", Direction::Egress)];
    let since = values.get("since", |text| time(text, MAX_SINCE))?;
    let read = ReadRequest {
        of,
        direction: values.get("direction", |text| one_of(text, &directions))?,
        settings: SettingsSpec {
            filter: values.get("filter", |text| parse_filter(text).map(|filter| filter.text))?,
            snap_length: values.get("snapLength", |text| parse_snaplen(text).map(u32::cast_signed))?,
            ..SettingsSpec::default()
        },
        super_frames: values.get("superFrames", |text| one_of(text, &[("true", ())]))?.is_some(),
        since_seconds: since.map(|since| since.as_secs() + u64::from(since.subsec_nanos() > 0)),
        follow: values.get("follow", |text| one_of(text, &[("false", ())]))?.is_none(),
        reader: String::new(),
    };
    if !read.follow && since.is_none() {
        return Err(Refusal::of("FieldValueInvalid", "follow", "false", "use it together with since"));
    }
    let lasts = values.get("timeoutSeconds", |text| whole(text, 5))?.map(Duration::from_secs);
    let node = scope.name.clone().filter(|_| is_of_node);
    Ok(Query::Packets(Box::new(Packets { scope, read, node, lasts })))
}

fn reports(scope: Scope, labels: LabelSelector, values: &Values) -> Result<Query, Refusal> {
    if values.0.contains_key("watch") {
        return Err(Refusal::new(405, "MethodNotAllowed", "podreports have no watch: get them again"));
    }
    values.get("limit", |text| whole(text, 9))?;
    values.get("resourceVersion", |text| one_of(text, &[("0", ())]))?;
    let interval = values.get("interval", |text| time(text, MAX_INTERVAL))?;
    Ok(Query::Reports(Reports { scope, labels, interval }))
}

/// The values of the parameters of a request.
struct Values(BTreeMap<&'static str, String>);

impl Values {
    fn read(query: &str, parameters: &'static str) -> Result<Self, Refusal> {
        let mut values = BTreeMap::new();
        for pair in query.split('&').filter(|_| !query.is_empty()) {
            let (key, raw) = pair.split_once('=').unwrap_or((pair, ""));
            let refusal = |reason, why: &str| Refusal::of(reason, key, raw, why);
            let Some(known) = parameters.split(' ').find(|known| *known == key) else {
                return Err(refusal("FieldValueNotSupported", &format!("the parameters are {parameters}")));
            };
            let form = format!("use 1 to {MAX_VALUE} bytes of UTF-8, and %25 and %3B for % and ;");
            let wrong = || refusal("FieldValueInvalid", &form);
            if values.insert(known, decode(raw).ok_or_else(wrong)?).is_some() {
                return Err(refusal("FieldValueDuplicate", "the parameter is repeated"));
            }
        }
        Ok(Self(values))
    }

    fn get<T>(&self, key: &str, read: impl FnOnce(&str) -> Result<T, String>) -> Result<Option<T>, Refusal> {
        let Some(value) = self.0.get(key) else { return Ok(None) };
        read(value).map(Some).map_err(|why| Refusal::of("FieldValueInvalid", key, value, &why))
    }

    /// As [`Self::get`]; a value that is missing is refused as an empty one is.
    fn require<T>(&self, key: &str, read: impl Fn(&str) -> Result<T, String>) -> Result<T, Refusal> {
        let why = || read("").err().unwrap_or_default();
        self.get(key, &read)?.ok_or_else(|| Refusal::of("FieldValueRequired", key, "", &why()))
    }
}

/// Decodes a value as Go does: `+` is a space, and `%` precedes two hexadecimal digits.
fn decode(raw: &str) -> Option<String> {
    let (mut text, mut rest) = (Vec::new(), raw.bytes());
    while let Some(byte) = rest.next() {
        let mut digit = || char::from(rest.next()?).to_digit(16);
        text.push(match byte {
            b'+' => b' ',
            b'%' => u8::try_from(16 * digit()? + digit()?).ok()?,
            byte => byte,
        });
    }
    let is_plain = raw.len() <= MAX_VALUE && !raw.contains(';');
    let text = String::from_utf8(text).ok().filter(|_| is_plain)?;
    (!text.is_empty() && !text.contains('\0')).then_some(text)
}

/// Reads a field selector in the only form that names one object.
fn only_name(text: &str) -> Result<String, String> {
    let name = text.strip_prefix("metadata.name=").filter(|name| is_subdomain(name));
    name.map(str::to_owned).ok_or_else(|| "use metadata.name=NAME".to_owned())
}

/// The meaning of one of these words.
fn one_of<T: Copy>(text: &str, words: &[(&str, T)]) -> Result<T, String> {
    let found = words.iter().find(|(word, _)| *word == text);
    let known = || words.iter().map(|(word, _)| *word).collect::<Vec<_>>().join(" or ");
    found.map(|(_, meaning)| *meaning).ok_or_else(|| format!("use {}", known()))
}

/// Reads a time from one second to `most`.
fn time(text: &str, most: Duration) -> Result<Duration, String> {
    let time = parse_duration(text)?;
    let bounds = || format!("use a time from 1s to {}", show_kubernetes_duration(most));
    (Duration::from_secs(1)..=most).contains(&time).then_some(time).ok_or_else(bounds)
}

/// Reads a whole number above 0, without leading zeros.
fn whole(text: &str, digits: usize) -> Result<u64, String> {
    let is_plain = text.len() <= digits && text.bytes().all(|byte| byte.is_ascii_digit());
    let number = text.parse::<u64>().ok().filter(|_| is_plain && !text.starts_with('0'));
    number.ok_or_else(|| format!("use a whole number of 1 to {digits} digits"))
}

/// The beginning of a text of any length, for a message.
fn start(text: &str) -> &str {
    &text[..text.floor_char_boundary(MAX_SHOWN)]
}

#[cfg(test)]
mod tests;
