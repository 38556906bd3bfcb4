//! [`TokenFile`]: a token file. kube's client also sends the newline at the end of the file, which is invalid in a
//! header, and it prefers an inline token over the file.

use std::{
    fmt, fs,
    path::PathBuf,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail};
use http::{HeaderValue, Request, header::AUTHORIZATION};

/// How long a token that was read is used. The issuer replaces a token a few minutes before it expires.
const FRESH: Duration = Duration::from_secs(60);

/// A token that is read again after a minute. While the file cannot be read, the last token is used.
#[derive(Clone)]
pub(crate) struct TokenFile {
    path: PathBuf,
    read: Arc<Mutex<(HeaderValue, Instant)>>,
}

impl fmt::Debug for TokenFile {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("TokenFile").field("path", &self.path).finish_non_exhaustive()
    }
}

impl TokenFile {
    /// Reads the file.
    pub(crate) fn open(path: PathBuf) -> anyhow::Result<Self> {
        let text = fs::read_to_string(&path).with_context(|| format!("tokenFile {}", path.display()))?;
        let token = header(text.trim()).with_context(|| format!("tokenFile {}", path.display()))?;
        Ok(Self { path, read: Arc::new(Mutex::new((token, Instant::now()))) })
    }

    /// Adds the token to a request.
    pub(crate) fn authorize<B>(&self, mut request: Request<B>) -> Request<B> {
        let mut read = self.read.lock().unwrap_or_else(PoisonError::into_inner);
        if read.1.elapsed() >= FRESH {
            let text = fs::read_to_string(&self.path).ok();
            let token = text.and_then(|text| header(text.trim()).ok()).unwrap_or_else(|| read.0.clone());
            *read = (token, Instant::now());
        }
        request.headers_mut().insert(AUTHORIZATION, read.0.clone());
        request
    }
}

/// Returns the header for a token.
pub(crate) fn header(token: &str) -> anyhow::Result<HeaderValue> {
    if token.is_empty() {
        bail!("the token is empty");
    }
    // The error does not contain the token.
    let mut header =
        HeaderValue::from_str(&format!("Bearer {token}")).context("the token is no text for a header")?;
    header.set_sensitive(true);
    Ok(header)
}
