//! Places for requests. A request takes a place of several owners, such as its user and its namespace. Each owner
//! has a maximum.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

/// The places that are taken, by what they are counted for.
#[derive(Debug, Clone, Default)]
pub(crate) struct Places(Arc<Mutex<BTreeMap<String, usize>>>);

/// A place, until it is dropped.
#[derive(Debug)]
pub struct Place {
    places: Places,
    counted: Vec<String>,
}

impl Places {
    /// Takes a place that is counted for each of these, which have a maximum.
    ///
    /// # Errors
    ///
    /// The first one that has no place, as a sentence.
    pub(crate) fn take(&self, counted: Vec<(String, usize)>) -> Result<Place, String> {
        let mut taken = self.taken();
        let is_full = |(of, most): &&(String, usize)| taken.get(of).is_some_and(|count| count >= most);
        if let Some((of, most)) = counted.iter().find(is_full) {
            return Err(format!("{most} {of} are open, and no more are allowed"));
        }
        let counted: Vec<_> = counted.into_iter().map(|(of, _)| of).collect();
        counted.iter().for_each(|of| *taken.entry(of.clone()).or_default() += 1);
        Ok(Place { places: self.clone(), counted })
    }

    #[cfg(test)]
    pub(crate) fn is_empty(&self) -> bool {
        self.taken().is_empty()
    }

    fn taken(&self) -> MutexGuard<'_, BTreeMap<String, usize>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut taken = self.places.taken();
        for of in &self.counted {
            taken.get_mut(of).into_iter().for_each(|count| *count -= 1);
        }
        taken.retain(|_, count| *count > 0);
    }
}
