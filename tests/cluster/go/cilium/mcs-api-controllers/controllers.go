// Package controllers is what Cilium needs of sigs.k8s.io/mcs-api/controllers: a constant for services of several
// clusters, which are switched off here.
package controllers

// DerivedServiceAnnotation is the annotation with the name of a ServiceImport's derived service.
const DerivedServiceAnnotation = "multicluster.kubernetes.io/derived-service"
