//! [`TokenFile`]: the token in a file. kube's client sends the newline at its end too, which no header may have, and
//! prefers the token beside it.

use std::{
    fmt, fs,
    path::PathBuf,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail};
use http::{HeaderValue, Request, header::AUTHORIZATION};

/// How long a token counts that was read: who hands it out replaces it a few minutes before its end.
const FRESH: Duration = Duration::from_secs(60);

/// A token that is read again once it is a minute old. While the file cannot be read, the last token counts.
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

    /// The request with the token.
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

/// The header for a token.
pub(crate) fn header(token: &str) -> anyhow::Result<HeaderValue> {
    if token.is_empty() {
        bail!("the token is empty");
    }
    // The error says nothing about the token itself.
    let mut header =
        HeaderValue::from_str(&format!("Bearer {token}")).context("the token is no text for a header")?;
    header.set_sensitive(true);
    Ok(header)
}
