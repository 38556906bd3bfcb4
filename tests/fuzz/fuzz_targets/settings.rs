//! The values of settings, as annotations and flags have them: each is read or refused, and what was read is shown in a form
//! that is read again as the same.

#![no_main]

use libfuzzer_sys::fuzz_target;
use mirror_core::settings::{KEYS, SETTINGS, Settings};

fuzz_target!(|input: (u8, &str)| {
    let (which, value) = input;
    let key = KEYS[usize::from(which) % KEYS.len()];
    let mut settings = Settings::default();
    if settings.set(key, value).is_err() {
        return;
    }
    settings.words();
    let shown = SETTINGS.iter().find(|setting| setting.key == key).and_then(|setting| setting.show(&settings));
    if let Some(shown) = shown {
        let mut again = Settings::default();
        assert!(again.set(key, &shown).is_ok(), "{key}: {value:?} is shown as {shown:?}");
        assert!(again.asks_the_same(&settings), "{key}: {value:?} is shown as {shown:?}");
    }
});
