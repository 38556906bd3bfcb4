//! A model of what kube-apiserver authorises for a URI, and of what it sends on to this server.
//!
//! It follows `NewRequestInfo` of k8s.io/apiserver v0.35.4 (`pkg/endpoints/request/requestinfo.go`) for GET, the parsers
//! of selectors and options that this calls, Go's `net/url`, and the proxy of kube-aggregator. Texts have a character for
//! each byte, because Go's texts are any bytes. The fuzz target `query` includes this file, so it names nothing of the
//! agent.

/// The verb, group, version, namespace, resource, subresource and name that are authorised. `Err`: the path, of a request
/// for no resource.
pub(super) type Info = Result<[String; 7], String>;

/// Checks that a server serves what kube-apiserver authorises. `serve` says what it serves for a URI, if anything. Returns
/// how often it serves something: for the URI itself, and as kube-apiserver sends it on.
pub(super) fn check(uri: &str, serve: impl Fn(&str) -> Option<Info>) -> usize {
    let Some(url) = Url::parse(uri) else { return 0 };
    let authorised = url.request_info();
    // Go escapes the '#' of a URI, so this server never sees one.
    let sent =
        [uri.split('#').next().filter(|whole| *whole == uri).map(str::to_owned), Some(url.forwarded())];
    let served = sent.iter().flatten().filter_map(|sent| Some((sent, serve(sent)?)));
    served.inspect(|(sent, info)| assert_eq!(*info, authorised, "{uri:?} is sent on as {sent:?}")).count()
}

/// A URI as kube-apiserver has parsed it.
struct Url {
    path: String,
    /// Keys and values, in their order.
    query: Vec<(String, String)>,
}

impl Url {
    /// `None`: kube-apiserver refuses the URI.
    fn parse(uri: &str) -> Option<Self> {
        let uri: String = uri.bytes().map(char::from).collect();
        if !uri.starts_with('/') || uri.contains(|c: char| c < ' ' || c == '\x7f') {
            return None;
        }
        let (path, query) = uri.split_once('?').unwrap_or((uri.as_str(), ""));
        // Go leaves out what it cannot read.
        let pair = |pair: &str| {
            let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
            let is_read = !pair.is_empty() && !pair.contains(';');
            is_read.then_some((unescape(key, ' ')?, unescape(value, ' ')?))
        };
        Some(Self { path: unescape(path, '+')?, query: query.split('&').filter_map(pair).collect() })
    }

    /// What kube-apiserver authorises.
    fn request_info(&self) -> Info {
        let path = self.path.trim_matches('/');
        let parts: Vec<_> = path.split('/').filter(|_| !path.is_empty()).collect();
        let (group, version, rest) = match parts.as_slice() {
            ["api", version, rest @ ..] if !rest.is_empty() => ("", *version, rest),
            ["apis", group, version, rest @ ..] if !rest.is_empty() => (*group, *version, rest),
            _ => return Err(self.path.clone()),
        };
        let (special, rest) = match rest {
            [verb @ ("proxy" | "watch"), rest @ ..] => (*verb, rest),
            rest => ("", rest),
        };
        let (namespace, parts) = match rest {
            ["namespaces", namespace] => (*namespace, rest),
            ["namespaces", namespace, "status" | "finalize", ..] => (*namespace, rest),
            ["namespaces", namespace, parts @ ..] => (*namespace, parts),
            // kube-apiserver answers with an error.
            [] => ("", &["no", "request"][..]),
            rest => ("", rest),
        };
        let part = |at: usize| parts.get(at).copied().unwrap_or_default();
        let subresource = if special == "proxy" { "" } else { part(2) };
        let (verb, name) = match (special, part(1)) {
            ("", "") => self.list_options(),
            ("", name) => ("get", name.to_owned()),
            (special, name) => (special, name.to_owned()),
        };
        Ok([verb, group, version, namespace, part(0), subresource, name.as_str()].map(str::to_owned))
    }

    /// The first value of a key.
    fn first(&self, key: &str) -> Option<&str> {
        self.query.iter().find(|(of, _)| of == key).map(|(_, value)| value.as_str())
    }

    /// The verb and the name of a request without a name in its path. If one option cannot be read, all others but
    /// `watch` are lost.
    fn list_options(&self) -> (&'static str, String) {
        let is_true = |value: &str| value != "0" && !value.eq_ignore_ascii_case("false");
        let verb = if self.first("watch").is_some_and(is_true) { "watch" } else { "list" };
        let is_number = |key: &str| self.first(key).is_none_or(|value| value.parse::<i64>().is_ok());
        let is_read = is_number("timeoutSeconds")
            && is_number("limit")
            && is_label_selector(self.first("labelSelector").unwrap_or_default());
        let name = exact_name(self.first("fieldSelector").unwrap_or_default()).filter(|_| is_read);
        let is_segment = |name: &String| name != "." && name != ".." && !name.contains(['/', '%']);
        (verb, name.filter(is_segment).unwrap_or_default())
    }

    /// The URI that kube-apiserver sends on.
    fn forwarded(&self) -> String {
        let mut query: Vec<_> = self.query.iter().collect();
        query.sort_by(|(a, _), (b, _)| a.cmp(b));
        let pair = |(key, value): &(String, String)| format!("{}={}", escape(key, " "), escape(value, " "));
        let query = query.into_iter().map(pair).collect::<Vec<_>>().join("&");
        let mark = if query.is_empty() { "" } else { "?" };
        format!("{}{mark}{query}", escape(&self.path, "$&+,/:;=@"))
    }
}

/// Decodes `%XX`; a `+` becomes `plus`.
fn unescape(text: &str, plus: char) -> Option<String> {
    let mut rest = text.chars();
    let mut plain = String::new();
    while let Some(c) = rest.next() {
        plain.push(match c {
            '%' => {
                let (high, low) = (rest.next()?.to_digit(16)?, rest.next()?.to_digit(16)?);
                char::from_u32(16 * high + low)?
            }
            '+' => plus,
            c => c,
        });
    }
    Some(plain)
}

/// Encodes all but letters, digits, `-_.~` and `plain`. A plain space becomes a `+`.
fn escape(text: &str, plain: &str) -> String {
    let escaped = text.chars().map(|c| match c {
        ' ' if plain.contains(' ') => "+".to_owned(),
        c if c.is_ascii_alphanumeric() || "-_.~".contains(c) || plain.contains(c) => c.to_string(),
        c => format!("%{:02X}", u32::from(c)),
    });
    escaped.collect()
}

/// The value that a field selector demands of `metadata.name`, or an empty text. `None`: it cannot be read.
fn exact_name(selector: &str) -> Option<String> {
    let (mut terms, mut is_escaped) = (vec![String::new()], false);
    for c in selector.chars() {
        if c == ',' && !is_escaped {
            terms.push(String::new());
        } else if let Some(term) = terms.last_mut() {
            term.push(c);
        }
        is_escaped = c == '\\' && !is_escaped;
    }
    terms.sort();
    let mut name = None;
    for term in terms.iter().filter(|term| !term.is_empty()) {
        let at = term.find("!=").into_iter().chain(term.find('=')).min()?;
        let (field, rest) = term.split_at(at);
        let (is_equal, raw) = match rest.strip_prefix("!=") {
            Some(raw) => (false, raw),
            None => (true, rest.strip_prefix("==").or_else(|| rest.strip_prefix('='))?),
        };
        let (mut value, mut raw) = (String::new(), raw.chars());
        while let Some(c) = raw.next() {
            value.push(match c {
                '\\' => raw.next().filter(|c| "\\,=".contains(*c))?,
                ',' | '=' => return None,
                c => c,
            });
        }
        if is_equal && field == "metadata.name" {
            name.get_or_insert(value);
        }
    }
    Some(name.unwrap_or_default())
}

const SPACES: [char; 4] = [' ', '\t', '\r', '\n'];
const SYMBOLS: &str = "=!(),><";

/// Whether a label selector can be read.
fn is_label_selector(selector: &str) -> bool {
    let (mut tokens, mut text) = (Vec::new(), selector.trim_start_matches(SPACES));
    while let Some(first) = text.chars().next() {
        let end = match first {
            '=' | '!' if text[1..].starts_with('=') => 2,
            first if SYMBOLS.contains(first) => 1,
            _ => text.find(|c: char| SPACES.contains(&c) || SYMBOLS.contains(c)).unwrap_or(text.len()),
        };
        let (token, rest) = text.split_at(end);
        tokens.push(token);
        text = rest.trim_start_matches(SPACES);
    }
    let mut rest = tokens.as_slice();
    while !rest.is_empty() {
        match requirement(rest) {
            Some([]) => return true,
            Some([",", after @ ..]) if !after.is_empty() => rest = after,
            _ => return false,
        }
    }
    true
}

/// The tokens after a requirement. `None`: it cannot be read.
fn requirement<'a, 'b>(tokens: &'a [&'b str]) -> Option<&'a [&'b str]> {
    let is_end = |rest: &[&str]| matches!(rest, [] | [",", ..]);
    let (is_negated, tokens) = match tokens {
        ["!", tokens @ ..] => (true, tokens),
        tokens => (false, tokens),
    };
    let (key, rest) = tokens.split_first()?;
    match rest {
        _ if !is_label_key(key) => None,
        rest if is_negated || is_end(rest) => Some(rest),
        ["in" | "notin", "(", rest @ ..] => {
            let end = rest.iter().position(|token| *token == ")")?;
            let (values, rest) = (&rest[..end], &rest[end + 1..]);
            let are_values = values.iter().all(|token| *token == "," || is_label_value(token));
            let are_apart = values.windows(2).all(|pair| pair.contains(&","));
            (are_values && are_apart).then_some(rest)
        }
        ["=" | "==" | "!=", rest @ ..] if is_end(rest) => Some(rest),
        ["=" | "==" | "!=", value, rest @ ..] => is_label_value(value).then_some(rest),
        [">" | "<", value, rest @ ..] => {
            (is_label_value(value) && value.parse::<i64>().is_ok()).then_some(rest)
        }
        _ => None,
    }
}

fn is_label_key(text: &str) -> bool {
    let (prefix, name) = text.split_once('/').unwrap_or(("without", text));
    let is_part = |part: &str| is_word(part, "-") && !part.contains(|c: char| c.is_ascii_uppercase());
    prefix.len() <= 253 && prefix.split('.').all(is_part) && !name.is_empty() && is_label_value(name)
}

fn is_label_value(text: &str) -> bool {
    text.is_empty() || text.len() <= 63 && is_word(text, "-_.")
}

/// Whether a text consists of letters and digits, with `inner` between them.
fn is_word(text: &str, inner: &str) -> bool {
    let is_outer = |c: char| c.is_ascii_alphanumeric();
    text.starts_with(is_outer)
        && text.ends_with(is_outer)
        && text.chars().all(|c| is_outer(c) || inner.contains(c))
}
